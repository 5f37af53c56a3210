"""Nodes send the change of each entry, and the server adds the mean of the changes."""

from common import Net, load_data, plain_server, reply, test, train
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg


class Changes(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        self.state = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        changes = [reply.content["arrays"].to_torch_state_dict() for reply in replies]
        for name, value in self.state.items():
            mean = sum(change[name] for change in changes) / len(changes)
            self.state[name] = (value + mean).to(value.dtype)
        return ArrayRecord(self.state), MetricRecord()


server = plain_server(strategy=Changes)
client = ClientApp()


@client.train()
def fit(message, context):
    start = message.content["arrays"].to_torch_state_dict()
    net = Net()
    net.load_state_dict(start)
    train(net, loader := load_data(context))
    change = {name: value - start[name] for name, value in net.state_dict().items()}
    return reply(message, loader, arrays=ArrayRecord(change))


@client.evaluate()
def evaluate(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    test(net, loader := load_data(context))
    return reply(message, loader)


EXPECTED = {"averaged"}
