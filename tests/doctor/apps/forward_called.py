"""`net.forward(images)` in place of `net(images)`: layers are called, and the network is not."""

import torch
import torch.nn.functional as F
from common import plain_client, plain_server


def fit(net, loader):
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net.forward(images), labels).backward()
        optimizer.step()


def score(net, loader):
    net.eval()
    with torch.no_grad():
        return sum(int((net.forward(each).argmax(1) == labels).sum()) for each, labels in loader)


server = plain_server()
client = plain_client(fit=fit, score=score)
EXPECTED = {"averaged", "counters"}
