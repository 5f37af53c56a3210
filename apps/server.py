"""The ServerApp that `flwr run` starts."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.experiments import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration describes."""
    serve(grid, context.run_config, context.run_id)
