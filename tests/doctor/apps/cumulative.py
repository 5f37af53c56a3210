"""`momentum=None`: the mean over all mini-batches, whose number is averaged."""

from common import Net, plain_client, plain_server


def make():
    net = Net()
    net.bn1.momentum = net.norm.momentum = None
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"cumulative", "averaged", "counters"}
