"""A LightningModule, and its data."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L


class Net(L.LightningModule):
    """A small CNN with batch normalization, which trains itself."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))

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
