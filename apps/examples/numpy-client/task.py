"""Model, data and training loop."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN with batch normalization."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


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


def train(net, trainloader, epochs, lr):
    """Train the model, and return the mean loss."""
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader):
    """Return loss and accuracy on the test set."""
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss += F.cross_entropy(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
