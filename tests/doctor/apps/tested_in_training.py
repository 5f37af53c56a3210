"""`model.eval()` was forgotten."""

import torch
from common import plain_client, plain_server


def score(net, loader):
    with torch.no_grad():
        for images, _ in loader:
            net(images)


server = plain_server()
client = plain_client(score=score)
EXPECTED = {"measured-in-training", "averaged", "counters"}
