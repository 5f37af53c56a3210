"""A momentum of 0."""

from common import Net, plain_client, plain_server


def make():
    net = Net()
    net.bn1.momentum = net.norm.momentum = 0.0
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"never-move", "averaged", "counters"}
