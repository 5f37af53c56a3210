"""Where the rows of a run also go: TensorBoard and Weights & Biases, each through its own
library.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedbn_flwr.plugins import extra
from fedbn_flwr.plugins.options import UsageError

#: takes the row of a round
Sink = Callable[[Mapping[str, Any]], None]
#: opens a sink for the run in a folder, with its options and the number of rounds that it has
#: already done
OpenSink = Callable[[Path, Mapping[str, Any], int], AbstractContextManager[Sink]]
#: project of Weights & Biases, unless `WANDB_PROJECT` names another
PROJECT = "fedbn-flwr"


def check_sinks(names: Sequence[str]) -> None:
    """Import what the sinks need.

    A UsageError names one that there is not, or the extra that is missing.
    """
    for name in names:
        if name not in SINKS:
            raise UsageError(f"unknown sink {name!r} in log-to; known: {', '.join(SINKS)}")
        with extra(name):
            import_module(SINKS[name][0])


@contextmanager
def open_sinks(
    names: Sequence[str], folder: Path, options: Mapping[str, Any], rounds_done: int
) -> Iterator[Sequence[Sink]]:
    """Open the sinks with these names, and close them after the run."""
    with ExitStack() as stack:
        yield [stack.enter_context(SINKS[name][1](folder, options, rounds_done)) for name in names]


@contextmanager
def tensorboard(folder: Path, options: Mapping[str, Any], rounds_done: int) -> Iterator[Sink]:
    """Write event files into the run's folder `tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    path = folder / "tensorboard"
    if not rounds_done:  # an earlier run's rounds would be drawn into this one's curves
        shutil.rmtree(path, ignore_errors=True)
    # a run that goes on repeats the rounds after its checkpoint: TensorBoard drops their first
    # values
    with SummaryWriter(str(path), purge_step=rounds_done + 1 if rounds_done else None) as writer:
        writer.add_text(
            "options", "\n".join(f"    {key}: {value}" for key, value in options.items())
        )

        def write(row: Mapping[str, Any]) -> None:
            for name, value in numbers_in(row).items():
                writer.add_scalar(name, value, row["round"])
            writer.flush()

        yield write


@contextmanager
def wandb(folder: Path, options: Mapping[str, Any], rounds_done: int) -> Iterator[Sink]:
    """Log to a run of Weights & Biases, whose environment variables (`WANDB_MODE`, ...) count as
    everywhere.
    """
    import wandb as library

    try:
        run = library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=str(options["method"]),
            name=f"{options['method']}, seed {options['seed']}",
            dir=str(folder),
            config=dict(options),
            settings=library.Settings(silent=True, console="off"),
        )
    except library.Error as error:  # no key, no network
        raise UsageError(f"log-to wandb: {error}") from error
    with run:
        yield lambda row: run.log(numbers_in(row), step=row["round"], commit=True)


#: values of `log-to`: the module that the extra of this name brings, and what opens the sink
SINKS: dict[str, tuple[str, OpenSink]] = {
    "tensorboard": ("torch.utils.tensorboard", tensorboard),
    "wandb": ("wandb", wandb),
}


def numbers_in(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name.

    Numbers of a mapping, such as accuracies by domain, are named `name/key`.
    """
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{key}": number for key, number in numbers_in(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = value
    return numbers
