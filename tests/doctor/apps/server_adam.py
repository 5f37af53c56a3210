"""Flower's FedAdam on a model with BN."""

from common import plain_client, plain_server
from flwr.serverapp.strategy import FedAdam

server = plain_server(strategy=lambda: FedAdam(eta=1.5, beta_1=0.0, beta_2=0.0))
client = plain_client()
EXPECTED = {"not-a-mean", "negative-variance", "counters"}
