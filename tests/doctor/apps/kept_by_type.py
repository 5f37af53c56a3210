"""FedBN as it should be: BN found by type, kept in the node's state."""

from common import Net, load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch.nn.modules.batchnorm import _BatchNorm

server = plain_server()
client = ClientApp()


def is_own(net, name):
    return isinstance(net.get_submodule(name.rpartition(".")[0]), _BatchNorm)


def open_net(message, context):
    net = Net()
    state = net.state_dict()
    arrays = message.content["arrays"].to_torch_state_dict()
    state.update({name: value for name, value in arrays.items() if not is_own(net, name)})
    if "bn" in context.state:
        state.update(context.state["bn"].to_torch_state_dict())
    net.load_state_dict(state)
    return net


@client.train()
def fit(message, context):
    net = open_net(message, context)
    train(net, loader := load_data(context))
    own = {name: value for name, value in net.state_dict().items() if is_own(net, name)}
    context.state["bn"] = ArrayRecord(own)
    shared = {name: value for name, value in net.state_dict().items() if name not in own}
    return reply(message, loader, arrays=ArrayRecord(shared))


@client.evaluate()
def evaluate(message, context):
    test(open_net(message, context), loader := load_data(context))
    return reply(message, loader)


EXPECTED = {"local"}
