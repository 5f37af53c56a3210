"""BYOL: the network learns from an average of its weights, which is made anew in each message."""

import copy

import torch
import torch.nn.functional as F
from common import plain_client, plain_server


def fit(net, loader):
    target = copy.deepcopy(net).requires_grad_(False).train()
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for images, _ in loader:
        optimizer.zero_grad()
        F.mse_loss(net(images + 0.1), target(images)).backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.01)


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"averaged", "counters"}
