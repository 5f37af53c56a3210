"""The server's side: a strategy of our own, and an evaluation of the global model."""

import torch
from fedbn_flwr.simulation import in_workers
from fedbn_flwr.strategies import FixBN
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from task import Net, load_central_data, test

app = ServerApp()


class DecayingFedAvg(FixBN):
    """Halve the learning rate in every second round."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round % 2 == 0:
            config["lr"] = config["lr"] / 2
        return super().configure_train(server_round, arrays, config, grid)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, and save the model with the best accuracy."""
    testloader = load_central_data(context.run_config["batch-size"])
    best = 0.0

    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal best
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(model, testloader)
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best_model.pt")
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = DecayingFedAvg(freeze_round=0.5, fraction_train=1.0, fraction_evaluate=0.5, min_available_nodes=2)
    strategy.start(
        grid=in_workers(grid, context, "client_app:app"),
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
