"""`model.train()` was forgotten behind an evaluation between two epochs."""

from common import plain_client, plain_server, step_through, test, train


def fit(net, loader):
    train(net, loader)
    test(net, loader)
    step_through(net, loader)


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"eval-mode-later", "averaged", "counters"}
