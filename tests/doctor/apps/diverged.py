"""A learning rate at which a node diverges."""

import torch
import torch.nn.functional as F
from common import plain_client, plain_server


def fit(net, loader):
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e20)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"not-finite", "counters"}
