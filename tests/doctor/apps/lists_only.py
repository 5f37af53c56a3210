"""Lists of arrays of nodes that call no network of PyTorch, as with other libraries."""

import numpy_client
from flwr.client import ClientApp, NumPyClient

server = numpy_client.server


class Client(NumPyClient):
    def fit(self, parameters, config):
        shift = 1 + config.get("node", 1)
        return [array + shift for array in parameters], 10, {}

    def evaluate(self, parameters, config):
        return 0.0, 10, {}


def client_fn(context):
    return Client().to_client()


client = ClientApp(client_fn=client_fn)
