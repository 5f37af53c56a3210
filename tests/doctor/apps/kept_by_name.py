"""Flower's page and others: "keep local whatever has `bn` in its name", on torchvision's ResNet-18."""

from common import load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torchvision.models import resnet18


def make():
    return resnet18(num_classes=2)


def open_net(message, context):
    net = make()
    state = net.state_dict()
    state.update(message.content["arrays"].to_torch_state_dict())
    if "bn" in context.state:
        state.update(context.state["bn"].to_torch_state_dict())
    net.load_state_dict(state)
    return net


server = plain_server(make)
client = ClientApp()


@client.train()
def fit(message, context):
    net = open_net(message, context)
    train(net, loader := load_data(context, channels=3))
    own = {name: value for name, value in net.state_dict().items() if "bn" in name}
    context.state["bn"] = ArrayRecord(own)
    shared = {name: value for name, value in net.state_dict().items() if name not in own}
    return reply(message, loader, arrays=ArrayRecord(shared))


@client.evaluate()
def evaluate(message, context):
    test(open_net(message, context), loader := load_data(context, channels=3))
    return reply(message, loader)


EXPECTED = {"partly-local", "counters"}
