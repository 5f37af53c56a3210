"""The whole state is sent, and the server averages `model.parameters()` into its model."""

import torch
from common import Net, plain_client, plain_server
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg


class Parameters(FedAvg):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def start_with(self, states):
        """Here the server's own model, which has seen no data."""

    def aggregate_train(self, server_round, replies):
        states = [reply.content["arrays"].to_torch_state_dict() for reply in replies]
        self.start_with(states)
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(sum(state[name] for state in states) / len(states))
        return ArrayRecord(self.net.state_dict()), MetricRecord()


server = plain_server(strategy=Parameters)
client = plain_client()
EXPECTED = {"not-averaged"}
