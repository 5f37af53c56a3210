"""The server's side."""

import torch
from fedbn_flwr.strategies import FixBN
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, and save the model."""
    strategy = FixBN(freeze_round=0.5, fraction_evaluate=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net(pretrained=context.run_config["pretrained"]).state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
