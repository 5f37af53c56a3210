"""Model, data and training loop."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification


def make_model():
    """Make a small ResNet; its outputs are an object with a loss and logits."""
    config = ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    return ResNetForImageClassification(config)


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
    optimizer = SGD(net.parameters(), lr=lr)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            outputs = net(pixel_values=images, labels=labels)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            running_loss += outputs.loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader):
    """Return loss and accuracy on the test set."""
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(pixel_values=images, labels=labels)
            loss += outputs.loss.item()
            correct += (outputs.logits.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
