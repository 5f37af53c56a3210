"""The same with BN behind a linear layer: PyTorch refuses a variance of one value."""

from functools import partial

from common import load_data, plain_client, plain_server
from torch import nn


def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


server = plain_server(make)
client = plain_client(make, data=partial(load_data, samples=201))
EXPECTED = {"one-value"}
