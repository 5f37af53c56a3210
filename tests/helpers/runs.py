"""Runs of a second, for tests."""

from collections.abc import Sequence

from fedbn_flwr.experiments import main

DATA = "synthetic:n=80:test=40:classes=4:size=8:channels=1"
OPTIONS = {
    "dataset": DATA,
    "partition": "iid",
    "clients": "2",
    "rounds": "3",
    "local-steps": "2",
    "batch-size": "8",
    "evaluate-every": "2",
    "device": "cpu",
}


def command(*words: str, **options: str) -> Sequence[str]:
    """A command line, with small options where no others are given."""
    chosen = {**OPTIONS, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [*words, *(word for name, value in chosen.items() for word in (f"--{name}", value))]


def run(*words: str, **options: str) -> int:
    """The exit code of `fedbn-flwr` with these words and options."""
    return main(command(*words, **options))
