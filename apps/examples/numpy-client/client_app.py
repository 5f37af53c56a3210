"""The nodes' side: parameters travel as lists."""

from collections import OrderedDict

import torch
from fedbn_flwr.clientapp import numpy_client_app
from flwr.app import Context
from flwr.client import NumPyClient

from task import Net, load_data, test, train


class FlowerClient(NumPyClient):
    """Train and evaluate on the data of one node."""

    def __init__(self, context: Context):
        self.context = context
        self.model = Net()
        partition_id, num_partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
        self.trainloader, self.testloader = load_data(partition_id, num_partitions, context.run_config["batch-size"])

    def shared(self):
        return list(self.model.state_dict())

    def get_parameters(self):
        return [self.model.state_dict()[name].numpy() for name in self.shared()]

    def set_parameters(self, parameters):
        values = zip(self.shared(), parameters, strict=True)
        self.model.load_state_dict(OrderedDict({name: torch.tensor(value) for name, value in values}), strict=False)

    def fit(self, parameters, config):
        self.set_parameters(parameters)
        loss = train(self.model, self.trainloader, self.context.run_config["local-epochs"], config["lr"])
        return self.get_parameters(), len(self.trainloader.dataset), {"train_loss": loss}

    def evaluate(self, parameters, config):
        self.set_parameters(parameters)
        loss, accuracy = test(self.model, self.testloader)
        return loss, len(self.testloader.dataset), {"accuracy": accuracy}


def client_fn(context: Context):
    return FlowerClient(context).to_client()


app = numpy_client_app(client_fn, Net)
