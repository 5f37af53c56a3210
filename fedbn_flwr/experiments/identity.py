"""What makes a run: its options and engine, users' code and data, and what its values were chosen from.

`config.json` in a run's folder has it. Whoever asks whether a folder holds a run asks here.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedbn_flwr import __version__
from fedbn_flwr.experiments.checkpoint import checkpoint_round, read_checkpoint
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.output.run_folder import (
    as_json,
    finished_summary,
    has_results,
    installed_versions,
    read_json,
)
from fedbn_flwr.plugins.options import UsageError

#: what the code that goes on with a run must have in common with the code that began it
VERSIONS = {"fedbn-flwr": __version__, **installed_versions(["torch"])}
#: options that change neither a bit of the model nor what is measured
FREE = {"checkpoint-every", "data-root", "exchange-timeout", "log-to", "min-nodes", "node-timeout"}
FREE |= {"connect-timeout", "exchange-address", "exchange-port"}
FREE |= {"plugins", "results-dir", "resume", "state-dir", "timeout"}


def options_in(folder: Path) -> dict[str, Any]:
    """Return the options of the run in a folder; empty if there is none."""
    config = read_json(folder / "config.json")
    return dict(config["options"]) if isinstance(config, dict) else {}


def differences(folder: Path, experiment: Experiment, engine: str, unknown: Collection[str] = ()) -> list[str]:
    """Return in what the run in a folder differs from this one; empty if it is this one, or has no results."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not has_results(folder):
        return []
    choice = experiment.choice
    before = {**config["options"], "engine": config.get("engine", engine), "grid": config.get("grid")}
    now = {**json.loads(as_json(experiment.to_mapping())), "engine": engine, "grid": choice.text if choice else None}
    before |= {f"code or data of {key}": value for key, value in config.get("code", {}).items()}
    now |= {f"code or data of {key}": value for key, value in experiment.code.items()}
    if checkpoint_round(folder) and finished_summary(folder) is None:
        before |= {f"version of {name}": config["versions"].get(name) for name in VERSIONS}
        now |= {f"version of {name}": value for name, value in VERSIONS.items()}
    hidden = {"method", *FREE, *unknown, *(choice.grid if choice and not choice.values else ())}
    # a method brings options of its own: it is what differs
    keys = ("method", *sorted({*before, *now} - hidden))
    return [f"{key} is {before.get(key)!r}, not {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]


def refuse_foreign(folder: Path, experiment: Experiment, engine: str) -> None:
    """Refuse to resume the run in a folder as another one; a UsageError names what differs."""
    if found := differences(folder, experiment, engine):
        raise UsageError(f"{folder} cannot be resumed: its {found[0]}")


def resume(given: Mapping[str, Any], engine: str | None) -> tuple[Experiment, str]:
    """Return the experiment and the engine of a run that is resumed; options that are given must be the run's own."""
    folder = Path(str(given["resume"])).expanduser()
    read_checkpoint(folder)  # says why there is none
    experiment = resolve({**options_in(folder), **given, "results-dir": str(folder)})
    engine = engine or str(read_json(folder / "config.json").get("engine", ""))
    refuse_foreign(folder, experiment, engine)
    return experiment, engine
