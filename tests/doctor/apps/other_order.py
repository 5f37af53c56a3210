"""Lists of arrays, in another order on one node."""

import numpy_client
from common import load_data, train
from flwr.client import ClientApp

server = numpy_client.server


class Client(numpy_client.Client):
    def fit(self, parameters, config):
        weights, samples, metrics = super().fit(parameters, config)
        if self.swaps:
            weights[2:4], weights[9:11] = weights[9:11], weights[2:4]
        return weights, samples, metrics


def client_fn(context):
    client = Client(load_data(context))
    client.swaps = context.node_config["partition-id"] == 1
    return client.to_client()


client = ClientApp(client_fn=client_fn)
EXPECTED = {"names-differ"}
