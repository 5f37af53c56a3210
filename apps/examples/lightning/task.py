"""A LightningModule, and its data."""

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lightning as L


class Net(L.LightningModule):
    """A network of timm with batch normalization, which trains itself; `pretrained` as ImageNet left it."""

    def __init__(self, lr=0.05, pretrained=False):
        super().__init__()
        self.lr = lr
        self.net = timm.create_model("test_efficientnet", pretrained=pretrained, num_classes=10, in_chans=1)

    def forward(self, x):
        return self.net(F.interpolate(x, size=32))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        images, labels = batch
        outputs = self(images)
        self.log("test_loss", F.cross_entropy(outputs, labels))
        self.log("test_acc", (outputs.argmax(1) == labels).double().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Load one node's digits: sorted by class, so that every node has other classes."""
    images, labels = load_digits(return_X_y=True)
    part = np.array_split(np.argsort(labels, kind="stable"), num_partitions)[partition_id]
    inputs = torch.tensor(images[part] / 16, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels[part])
    test = torch.arange(len(part)) % 5 == 0
    trainset = TensorDataset(inputs[~test], targets[~test])
    testset = TensorDataset(inputs[test], targets[test])
    return DataLoader(trainset, batch_size=batch_size, shuffle=True), DataLoader(testset, batch_size=batch_size)
