"""The FedBN tutorial: BN is not sent, and what comes back is loaded with `strict=True`."""

from common import Net, load_data, plain_server, reply, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg


def make_client(strict):
    client = ClientApp()

    @client.train()
    def fit(message, context):
        net = Net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=strict)
        train(net, loader := load_data(context))
        names = [name for name in net.state_dict() if "bn" not in name and "norm" not in name]
        shared = {name: net.state_dict()[name] for name in names}
        return reply(message, loader, arrays=ArrayRecord(shared))

    return client


client = make_client(True)
server = plain_server(strategy=lambda: FedAvg(fraction_evaluate=0.0))
EXPECTED = {"does-not-load"}
