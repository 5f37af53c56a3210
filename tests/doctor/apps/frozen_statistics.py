"""A pretrained network that trains in evaluation mode, on purpose."""

from common import Net, load_data, plain_client, plain_server, step_through, train
from flwr.app import Context, RecordDict


def make():
    net = Net()
    train(net, load_data(Context(0, 0, {"partition-id": 7}, RecordDict(), {})))
    return net


def fit(net, loader):
    net.eval()
    step_through(net, loader)


server = plain_server(make)
client = plain_client(fit=fit)
EXPECTED = {"eval-mode", "averaged", "counters"}
