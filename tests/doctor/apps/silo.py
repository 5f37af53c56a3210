"""SiloBN: weights are shared, running statistics stay."""

from common import Net, load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

server = plain_server()
client = ClientApp()


def open_net(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    if "statistics" in context.state:
        own = context.state["statistics"].to_torch_state_dict()
        net.load_state_dict(own, strict=False)
    return net


@client.train()
def fit(message, context):
    net = open_net(message, context)
    train(net, loader := load_data(context))
    context.state["statistics"] = ArrayRecord(dict(net.named_buffers()))
    return reply(message, loader, arrays=ArrayRecord(dict(net.named_parameters())))


@client.evaluate()
def evaluate(message, context):
    test(open_net(message, context), loader := load_data(context))
    return reply(message, loader)


EXPECTED = {"statistics-local"}
