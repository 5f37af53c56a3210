"""Gradients come from `torch.func.grad`, inside of which tensors have no numbers."""

import torch
import torch.nn.functional as F
from common import plain_client, plain_server
from torch.func import functional_call, grad, vmap


def fit(net, loader):
    net.eval()
    parameters = dict(net.named_parameters())

    def loss(values, images, labels):
        return F.cross_entropy(functional_call(net, values, (images,)), labels)

    for images, labels in loader:
        values = {name: value.detach() for name, value in parameters.items()}
        each = vmap(grad(loss), (None, 0, 0))(values, images.unsqueeze(1), labels.unsqueeze(1))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= 0.05 * each[name].mean(0)


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"eval-mode-untrained", "averaged", "counters"}
