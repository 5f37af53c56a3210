"""A one-stage detector on scenes of small pictures, with an average of its weights."""

import copy
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import plain_server, reply
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn


class Detector(nn.Module):
    """For each cell of a grid: whether an object's centre is there, its box, its class."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs in ((1, 8), (8, 16), (16, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.predict = nn.Conv2d(16, 1 + 4 + 10, 1)

    def forward(self, scenes):
        return self.predict(self.backbone(scenes))


def open_pictures(context, generator):
    """Return small pictures of things: Fashion-MNIST's, or shapes drawn here."""
    if "fashion-mnist" in context.run_config:
        folder = Path(context.run_config["fashion-mnist"])
        images = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:]
        pictures = torch.from_numpy(np.frombuffer(images, np.uint8).reshape(-1, 1, 28, 28) / 255)
        chosen = torch.randint(len(labels), (100,), generator=generator)
        pictures = F.interpolate(pictures[chosen].float(), (16, 16), mode="area")[:, 0]
        return pictures, torch.tensor(list(labels))[chosen]
    labels = torch.arange(60) % 3
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    shapes = torch.stack([rows < columns, (rows - 8) ** 2 + (columns - 8) ** 2 < 40, rows % 4 < 2])
    return shapes[labels] * torch.rand(60, 1, 1, generator=generator), labels


def draw_scene(generator, pictures, labels):
    """Paste a few pictures into a scene of 64 x 64; return it with its targets, cell by cell."""
    scene = torch.zeros(1, 64, 64)
    target = torch.zeros(6, 8, 8)
    for _ in range(3):
        index = int(torch.randint(len(pictures), (1,), generator=generator))
        top, left = torch.randint(64 - 16, (2,), generator=generator).tolist()
        scene[0, top : top + 16, left : left + 16] = pictures[index]
        row, column = (top + 8) // 8, (left + 8) // 8
        box = torch.tensor([(top + 8) % 8 / 8, (left + 8) % 8 / 8, 1.0, 1.0])
        target[:, row, column] = torch.cat([torch.ones(1), box, labels[index].reshape(1).float()])
    return scene, target


def load_scenes(context):
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    pictures, labels = open_pictures(context, generator)
    drawn = [draw_scene(generator, pictures, labels) for _ in range(64)]
    scenes, targets = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(scenes, targets), batch_size=4
    )


def loss_of(predicted, target):
    there = target[:, 0]
    objects = there.bool()
    loss = F.binary_cross_entropy_with_logits(predicted[:, 0], there)
    boxes = predicted[:, 1:5].movedim(1, -1)[objects]
    loss = loss + F.smooth_l1_loss(boxes, target[:, 1:5].movedim(1, -1)[objects])
    classes = predicted[:, 5:].movedim(1, -1)[objects]
    return loss + F.cross_entropy(classes, target[:, 5][objects].long())


def follow(average, net, names):
    """Move some entries of an average towards a network's."""
    now = net.state_dict()
    for name, value in average.state_dict().items():
        if name in names:
            value.copy_(now[name] if not value.is_floating_point() else value.lerp(now[name], 0.1))


def make_client(names_of):
    client = ClientApp()

    @client.train()
    def fit(message, context):
        net = Detector()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        average = copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        net.train()
        for scenes, targets in (loader := load_scenes(context)):
            optimizer.zero_grad()
            loss_of(net(scenes), targets).backward()
            optimizer.step()
            follow(average, net, names_of(net))
        return reply(message, loader, arrays=ArrayRecord(average.state_dict()))

    @client.evaluate()
    def evaluate(message, context):
        net = Detector()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        net.eval()
        loader = load_scenes(context)
        with torch.no_grad():
            loss = sum(float(loss_of(net(scenes), targets)) for scenes, targets in loader)
        assert loss == loss
        return reply(message, loader)

    return client


server = plain_server(Detector, FedAvg)
client = make_client(lambda net: set(net.state_dict()))
EXPECTED = {"averaged", "counters"}
