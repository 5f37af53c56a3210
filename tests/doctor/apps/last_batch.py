"""One sample is left for the last mini-batch, on nodes with 201 samples."""

from functools import partial

from common import load_data, plain_client, plain_server

server = plain_server()
client = plain_client(data=partial(load_data, samples=201))
EXPECTED = {"one-sample", "averaged", "counters"}
