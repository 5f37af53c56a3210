"""The older interfaces: NumPyClient, lists of arrays, server_fn."""

import torch
from common import Net, load_data, test, train
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


def get_weights(net):
    return [value.cpu().numpy() for value in net.state_dict().values()]


class Client(NumPyClient):
    def __init__(self, loader):
        self.net, self.loader = Net(), loader

    def load(self, weights):
        state = zip(self.net.state_dict(), map(torch.tensor, weights), strict=True)
        self.net.load_state_dict(dict(state), strict=True)

    def fit(self, parameters, config):
        self.load(parameters)
        train(self.net, self.loader)
        return get_weights(self.net), len(self.loader.dataset), {}

    def evaluate(self, parameters, config):
        self.load(parameters)
        return 0.0, len(self.loader.dataset), {"accuracy": test(self.net, self.loader)}


def client_fn(context: Context):
    return Client(load_data(context)).to_client()


def server_fn(context: Context):
    strategy = FedAvg(initial_parameters=ndarrays_to_parameters(get_weights(Net())))
    config = ServerConfig(num_rounds=int(context.run_config["num-server-rounds"]))
    return ServerAppComponents(strategy=strategy, config=config)


server = ServerApp(server_fn=server_fn)
client = ClientApp(client_fn=client_fn)
EXPECTED = {"averaged"}
