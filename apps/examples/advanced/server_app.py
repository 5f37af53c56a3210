"""The server's side: a strategy of our own, whose loop over the rounds keeps the best model."""

import torch
from fedbn_flwr.simulation import in_workers
from fedbn_flwr.strategies import FixBN
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from task import Net, load_central_data, test

app = ServerApp()


class DecayingFedAvg(FixBN):
    """Halve the learning rate in every second round, and save the model with the best accuracy."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round % 2 == 0:
            config["lr"] = config["lr"] / 2
        return super().configure_train(server_round, arrays, config, grid)

    def start(self, grid, initial_arrays, num_rounds, timeout=3600.0, train_config=None, evaluate_fn=None):
        arrays = initial_arrays
        result = Result()
        best = 0.0
        for server_round in range(1, num_rounds + 1):
            messages = self.configure_train(server_round, arrays, train_config, grid)
            replies = grid.send_and_receive(messages=messages, timeout=timeout)
            trained, metrics = self.aggregate_train(server_round, replies)
            if trained is not None:
                arrays = trained
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            messages = self.configure_evaluate(server_round, arrays, ConfigRecord(), grid)
            replies = grid.send_and_receive(messages=messages, timeout=timeout)
            metrics = self.aggregate_evaluate(server_round, replies)
            if metrics is not None:
                result.evaluate_metrics_clientapp[server_round] = metrics
            scores = evaluate_fn(server_round, arrays)
            result.evaluate_metrics_serverapp[server_round] = scores
            if scores["accuracy"] > best:
                best = scores["accuracy"]
                torch.save(arrays.to_torch_state_dict(), "best_model.pt")
        result.arrays = arrays
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    testloader = load_central_data(context.run_config["batch-size"])

    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(model, testloader)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = DecayingFedAvg(freeze_round=2, fraction_train=1.0, fraction_evaluate=0.5, min_available_nodes=2)
    strategy.start(
        grid=in_workers(grid, context, "client_app:app"),
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
