"""The nodes' side: a client of the library, which exchanges whole models."""

from fedbn_flwr.clientapp import numpy_client_app
from flwr.app import Context

from library import BasicClient
from task import Net, load_data


class DigitsClient(BasicClient):
    """Digits and a small CNN."""

    def get_model(self):
        return Net()

    def get_data_loaders(self):
        node, options = self.context.node_config, self.context.run_config
        return load_data(node["partition-id"], node["num-partitions"], options["batch-size"])


def client_fn(context: Context):
    return DigitsClient(context).to_client()


app = numpy_client_app(client_fn, Net)
