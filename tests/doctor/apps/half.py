"""All arrays travel in half precision."""

from common import Net, load_data, plain_server, reply, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

server = plain_server(strategy=lambda: FedAvg(fraction_evaluate=0.0))
client = ClientApp()


@client.train()
def fit(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(net, loader := load_data(context))
    state = {
        name: value.half() if value.is_floating_point() else value
        for name, value in net.state_dict().items()
    }
    return reply(message, loader, arrays=ArrayRecord(state))


EXPECTED = {"half", "averaged", "counters"}
