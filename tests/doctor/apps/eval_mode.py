"""`model.train()` was forgotten behind the last evaluation."""

from common import plain_client, plain_server, step_through


def fit(net, loader):
    net.eval()
    step_through(net, loader)


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"eval-mode-untrained", "averaged", "counters"}
