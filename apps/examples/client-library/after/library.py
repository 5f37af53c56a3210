"""A small library of clients: hooks make model, data, loss and optimizer, and exchangers say which layers travel."""

from collections import OrderedDict

import torch
from flwr.app import ArrayRecord
from flwr.client import NumPyClient


class FullExchanger:
    """All entries travel."""

    def names(self, model):
        return list(model.state_dict())


class LayerExchangerWithExclusions:
    """All entries travel but those of layers of some types."""

    def __init__(self, excluded):
        self.excluded = tuple(excluded)

    def names(self, model):
        own = [name for name, layer in model.named_modules() if isinstance(layer, self.excluded)]
        return [key for key in model.state_dict() if key.rpartition(".")[0] not in own]


class BasicClient(NumPyClient):
    """Train for some epochs; a subclass overrides the hooks."""

    def __init__(self, context):
        self.context = context
        self.epochs = context.run_config["local-epochs"]
        self.model = self.get_model()
        self.exchanger = self.get_exchanger()
        if "local" in context.state:
            self.model.load_state_dict(context.state["local"].to_torch_state_dict(), strict=False)
        self.train_loader, self.val_loader = self.get_data_loaders()
        self.criterion = self.get_criterion()

    def get_model(self):
        raise NotImplementedError

    def get_data_loaders(self):
        raise NotImplementedError

    def get_exchanger(self):
        return FullExchanger()

    def get_criterion(self):
        return torch.nn.CrossEntropyLoss()

    def get_optimizer(self, config):
        return torch.optim.SGD(self.model.parameters(), lr=config["lr"])

    def push(self):
        state = self.model.state_dict()
        return [state[name].cpu().numpy() for name in self.exchanger.names(self.model)]

    def pull(self, parameters):
        values = zip(self.exchanger.names(self.model), parameters, strict=True)
        state = OrderedDict({name: torch.tensor(value) for name, value in values})
        self.model.load_state_dict(state, strict=False)

    def train_step(self, batch, optimizer):
        inputs, targets = batch
        optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    def fit(self, parameters, config):
        self.pull(parameters)
        self.model.train()
        optimizer = self.get_optimizer(config)
        losses = [self.train_step(batch, optimizer) for _ in range(self.epochs) for batch in self.train_loader]
        shared = self.exchanger.names(self.model)
        local = {name: value for name, value in self.model.state_dict().items() if name not in shared}
        self.context.state["local"] = ArrayRecord(local)
        return self.push(), len(self.train_loader.dataset), {"train_loss": sum(losses) / len(losses)}

    def evaluate(self, parameters, config):
        self.pull(parameters)
        self.model.eval()
        loss, correct = 0.0, 0
        with torch.no_grad():
            for inputs, targets in self.val_loader:
                outputs = self.model(inputs)
                loss += self.criterion(outputs, targets).item()
                correct += (outputs.argmax(1) == targets).sum().item()
        count = len(self.val_loader.dataset)
        return loss / len(self.val_loader), count, {"accuracy": correct / count}
