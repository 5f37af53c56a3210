"""One of two BN layers is of a class that is none of torch's."""

from common import Net, plain_client, plain_server

from tests.helpers.other_shapes import OwnNorm


def make():
    net = Net()
    net.norm = OwnNorm(8)
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"foreign", "averaged", "counters"}
