"""Runs of the console command that take a second, and what runs leave."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.run_folder import read_rounds

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


#: what depends on who ran it: only `flwr run` draws, and only nodes of this process leave their own
#: models
BESIDE = ("lock", "curves.png", "personal")


def command(*words: str, **options: str) -> Sequence[str]:
    """Return a command line; options that are not given are small."""
    chosen = {**OPTIONS, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [*words, *(word for name, value in chosen.items() for word in (f"--{name}", value))]


def run(*words: str, **options: str) -> int:
    """Run `fedbn-flwr` with these words and options, and return its exit code."""
    return main(command(*words, **options))


#: keys of a summary that say how a run was trained
HOW_TRAINED = ("trained-by", "trained-alone", "not-captured")


def run_in(study: Path, method: str = "", seed: int | str = "") -> Path:
    """Return the folder of the run that a study has, or has of this method and seed; of a run, its
    own.
    """
    if (study / "config.json").exists():
        return study
    (folder,) = study.glob(f"{method or '*'}-seed{seed}*")
    return folder


def rounds(folder: Path) -> list[dict[str, Any]]:
    """Return a run's rounds without their times."""
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in read_rounds(run_in(folder))
    ]


def model_bytes(folder: Path) -> bytes:
    """Return the model that a run has written."""
    return (run_in(folder) / "model.safetensors").read_bytes()


def results(folder: Path) -> dict[str, Any]:
    """Return what a run has written, without times and engines: the names of its files, rounds, summary and
    model.
    """
    folder = run_in(folder)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("seconds", *HOW_TRAINED):
        summary.pop(key, None)
    names = sorted(path.name for path in folder.iterdir() if path.name not in BESIDE)
    return {
        "files": names,
        "rounds": rounds(folder),
        "summary": summary,
        "model": model_bytes(folder),
    }


def summary_bytes(folder: Path) -> dict[str, bytes]:
    """Return the summaries of a comparison's runs, with their times, by the names of their
    folders.
    """
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/summary.json")}
