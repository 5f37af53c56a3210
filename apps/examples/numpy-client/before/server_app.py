"""The server's side, on Flower's older API."""

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from task import Net


def server_fn(context: Context):
    lr = context.run_config["learning-rate"]
    initial = [value.numpy() for name, value in Net().state_dict().items() if "bn" not in name]
    strategy = FedAvg(
        fraction_evaluate=1.0,
        initial_parameters=ndarrays_to_parameters(initial),
        on_fit_config_fn=lambda server_round: {"lr": lr},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(context.run_config["num-server-rounds"]))


app = ServerApp(server_fn=server_fn)
