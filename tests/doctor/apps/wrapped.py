"""The network is trained in a wrapper that has its state, as Lightning's Fabric makes one."""

from common import Net, plain_client, plain_server, train
from torch import nn


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)

    def state_dict(self, *args, **options):
        return self.module.state_dict(*args, **options)


def fit(net, loader):
    train(Wrapper(net), loader)


server = plain_server()
client = plain_client(Net, fit)
EXPECTED = {"averaged", "counters"}
