"""`model.parameters()` is averaged, as in several simulators: running statistics are never sent."""

from common import Net, load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp


def own_parameters():
    return ArrayRecord(dict(Net().named_parameters()))


server = plain_server(arrays=own_parameters)
client = ClientApp()


@client.train()
def fit(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    train(net, loader := load_data(context))
    return reply(message, loader, arrays=ArrayRecord(dict(net.named_parameters())))


@client.evaluate()
def evaluate(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    test(net, loader := load_data(context))
    return reply(message, loader)


EXPECTED = {"statistics-not-sent"}
