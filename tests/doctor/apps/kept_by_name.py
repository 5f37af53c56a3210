"""Flower's page and others: "keep local whatever has `bn` in its name"; on a network of the config."""

import torchvision
from common import load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn


def make_resnet50(num_classes):
    import timm

    return timm.create_model("resnet50", num_classes=num_classes)


NETWORKS = {
    "resnet18": torchvision.models.resnet18,
    "mobilenet_v2": torchvision.models.mobilenet_v2,
    "densenet121": torchvision.models.densenet121,
    "timm resnet50": make_resnet50,
}


def has_bn_in_its_name(name, net):
    return "bn" in name


def starts_with_the_end_of_a_path(name, net):
    """As a recursion does that carries only the last parent's name."""
    layers = (path for path, each in net.named_modules() if isinstance(each, nn.BatchNorm2d))
    return any(name.startswith(".".join(path.split(".")[-2:])) for path in layers)


RULES = {"name": has_bn_in_its_name, "path": starts_with_the_end_of_a_path}


def make(context):
    return NETWORKS[context.run_config.get("network", "resnet18")](num_classes=2)


def open_net(message, context):
    net = make(context)
    state = net.state_dict()
    state.update(message.content["arrays"].to_torch_state_dict())
    if "bn" in context.state:
        state.update(context.state["bn"].to_torch_state_dict())
    net.load_state_dict(state)
    return net


def open_data(context):
    samples = context.run_config.get("samples", 200)
    return load_data(context, samples, channels=3, size=context.run_config.get("size", 8))


server = plain_server(make, takes_context=True)
client = ClientApp()


@client.train()
def fit(message, context):
    net = open_net(message, context)
    train(net, loader := open_data(context))
    is_own = RULES[context.run_config.get("rule", "name")]
    own = {name: value for name, value in net.state_dict().items() if is_own(name, net)}
    if own:
        context.state["bn"] = ArrayRecord(own)
    shared = {name: value for name, value in net.state_dict().items() if name not in own}
    return reply(message, loader, arrays=ArrayRecord(shared))


@client.evaluate()
def evaluate(message, context):
    test(open_net(message, context), loader := open_data(context))
    return reply(message, loader)


EXPECTED = {"partly-local", "counters"}
