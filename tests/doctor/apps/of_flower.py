"""Flower's own strategies, by the name in the run config."""

import torch
from common import Net, plain_client
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp, strategy

NODES = 3
OPTIONS = {
    "FedAvgM": {"server_momentum": 0.9},
    "FedProx": {"proximal_mu": 0.1},
    "FedTrimmedAvg": {"beta": 0.34},
}
server = ServerApp()


@server.main()
def main(grid, context):
    torch.manual_seed(0)
    name = context.run_config["strategy"]
    if name.startswith("DifferentialPrivacy"):
        made = getattr(strategy, name)(strategy.FedAvg(), 0.1, 0.5, num_sampled_clients=3)
    else:
        made = getattr(strategy, name)(**OPTIONS.get(name, {}))
    rounds = context.run_config["num-server-rounds"]
    made.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=rounds)


client = plain_client()
