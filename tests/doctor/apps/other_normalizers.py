"""GroupNorm: no BN at all."""

from common import Net, plain_client, plain_server
from torch import nn


def make():
    net = Net()
    net.bn1 = nn.GroupNorm(2, 6)
    net.norm = nn.GroupNorm(2, 8)
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"no-bn", "others"}
