"""A backbone whose parameters are frozen, and that is in training mode."""

from common import Net, plain_client, plain_server


def make():
    net = Net()
    for layer in (net.conv1, net.bn1, net.conv2, net.norm):
        layer.requires_grad_(False)
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"frozen-moves", "averaged", "counters"}
