"""MOON: a node compares its network with the global one and with its own last one."""

import copy

import torch
import torch.nn.functional as F
from common import Net, load_data, plain_server, reply, test
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

server = plain_server()
client = ClientApp()
EXPECTED = {"averaged", "counters"}


def received(message: Message) -> Net:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net


@client.train()
def _(message: Message, context: Context) -> Message:
    loader = load_data(context)
    net = received(message)
    shared = copy.deepcopy(net).eval()
    last = Net().train()
    if "last" in context.state:
        last.load_state_dict(context.state["last"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for images, labels in loader:
        optimizer.zero_grad()
        outputs = net(images)
        alike = [F.cosine_similarity(outputs, other(images)) for other in (shared, last)]
        pulled = F.cross_entropy(torch.stack(alike, 1), torch.zeros(len(images)).long())
        (F.cross_entropy(outputs, labels) + pulled).backward()
        optimizer.step()
    context.state["last"] = ArrayRecord(net.state_dict())
    return reply(message, loader, arrays=ArrayRecord(net.state_dict()))


@client.evaluate()
def _(message: Message, context: Context) -> Message:
    loader = load_data(context)
    test(received(message), loader)
    return reply(message, loader)
