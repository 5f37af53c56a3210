"""The ServerApp that `flwr run` starts."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.experiments import UsageError, serve
from fedbn_flwr.plugins import MissingExtraError
from fedbn_flwr.strategies import CannotTrainError, NotObeyedError

app = ServerApp()


class RunEndedError(Exception):
    """A run ends for a reason that one line says:

    Flower's log would show a traceback of thirty lines with it.
    """

    # logging reads this attribute, and context managers set it
    __traceback__ = property(lambda _: None, lambda *_: None)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration describes."""
    try:
        serve(grid, context.run_config, context.run_id)
    except (CannotTrainError, MissingExtraError, NotObeyedError, UsageError) as error:
        raise RunEndedError(" ".join(str(error).split())) from None
