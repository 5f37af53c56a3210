"""Four steps a round, at the default momentum."""

from functools import partial

from common import load_data, plain_client, plain_server

server = plain_server()
client = plain_client(data=partial(load_data, samples=32))
EXPECTED = {"lag", "averaged", "counters"}
