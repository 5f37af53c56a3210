"""Flower's message API, all of the state sent."""

from common import plain_client, plain_server

server = plain_server()
client = plain_client()
EXPECTED = {"averaged", "counters"}
