"""Between two epochs, an evaluation without `torch.no_grad()`, which changes nothing."""

from common import plain_client, plain_server, train


def fit(net, loader):
    train(net, loader)
    net.eval()
    for images, _ in loader:
        net(images)
    train(net, loader)


server = plain_server()
client = plain_client(fit=fit)
EXPECTED = {"averaged", "counters"}
