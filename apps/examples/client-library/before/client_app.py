"""The nodes' side: a client of the library, which leaves batch normalization out of the exchange."""

from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from library import BasicClient, LayerExchangerWithExclusions
from task import Net, load_data


class DigitsClient(BasicClient):
    """Digits and a small CNN."""

    def get_model(self):
        return Net()

    def get_data_loaders(self):
        node, options = self.context.node_config, self.context.run_config
        return load_data(node["partition-id"], node["num-partitions"], options["batch-size"])

    def get_exchanger(self):
        return LayerExchangerWithExclusions({nn.BatchNorm2d})


def client_fn(context: Context):
    return DigitsClient(context).to_client()


app = ClientApp(client_fn=client_fn)
