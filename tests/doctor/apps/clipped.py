"""Clipping by the norm of all that is sent, running statistics and counters too."""

from common import Net, load_data, plain_server, reply, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

server = plain_server(strategy=lambda: FedAvg(fraction_evaluate=0.0))
client = ClientApp()


def clip(start, end, norm=0.3):
    squares = sum(((end[name] - value).double() ** 2).sum() for name, value in start.items())
    factor = min(1.0, norm / float(squares) ** 0.5)
    return {name: value + factor * (end[name] - value) for name, value in start.items()}


@client.train()
def fit(message, context):
    start = message.content["arrays"].to_torch_state_dict()
    net = Net()
    net.load_state_dict(start)
    train(net, loader := load_data(context))
    return reply(message, loader, arrays=ArrayRecord(clip(start, net.state_dict())))


EXPECTED = {"shortened", "clipped-by-statistics"}
