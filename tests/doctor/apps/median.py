"""A robust rule: no mean, and nothing wrong."""

from common import plain_client, plain_server
from flwr.serverapp.strategy import FedMedian

server = plain_server(strategy=FedMedian)
client = plain_client()
EXPECTED = {"between", "counters"}
NODES = 3
