"""A shared network, and one of each node's own that is pulled towards it (Ditto)."""

from common import Net, load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn

server = plain_server()
client = ClientApp()
EXPECTED = {"averaged", "counters", "local"}


def own_network(context: Context) -> nn.Module:
    net = Net()
    if "own" in context.state:
        net.load_state_dict(context.state["own"].to_torch_state_dict())
    return net


@client.train()
def _(message: Message, context: Context) -> Message:
    loader = load_data(context)
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(net, loader)
    own = own_network(context)
    train(own, loader)
    for mine, shared in zip(own.parameters(), net.parameters(), strict=True):
        mine.data.lerp_(shared.data, 0.1)
    context.state["own"] = ArrayRecord(own.state_dict())
    return reply(message, loader, arrays=ArrayRecord(net.state_dict()))


@client.evaluate()
def _(message: Message, context: Context) -> Message:
    loader = load_data(context)
    test(own_network(context), loader)
    return reply(message, loader)
