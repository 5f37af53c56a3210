"""Runs of the console command that take a second."""

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
    """Return a command line; options that are not given are small."""
    chosen = {**OPTIONS, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [*words, *(word for name, value in chosen.items() for word in (f"--{name}", value))]


def run(*words: str, **options: str) -> int:
    """Run `fedbn-flwr` with these words and options, and return its exit code."""
    return main(command(*words, **options))
