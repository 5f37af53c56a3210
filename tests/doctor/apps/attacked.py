"""Adversarial training: in evaluation mode, images are moved along their gradients."""

import torch
import torch.nn.functional as F
from common import plain_client, plain_server, step_through
from torch import nn
from torch.utils.data import DataLoader


def attacked(net: nn.Module, loader: DataLoader):
    for images, labels in loader:
        net.eval()
        moved = images.clone().requires_grad_()
        (direction,) = torch.autograd.grad(F.cross_entropy(net(moved), labels), moved)
        net.train()
        yield images + 0.1 * direction.sign(), labels


def fit(net: nn.Module, loader: DataLoader) -> None:
    step_through(net, attacked(net, loader))


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"averaged", "counters"}
