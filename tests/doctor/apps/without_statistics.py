"""`track_running_stats=False` in one layer."""

from common import Net, plain_client, plain_server
from torch import nn


def make():
    net = Net()
    net.norm = nn.BatchNorm2d(8, track_running_stats=False)
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"without-statistics", "averaged", "counters"}
