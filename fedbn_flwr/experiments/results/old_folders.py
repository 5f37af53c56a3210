"""Read what versions without `study.json` wrote: comparisons, matrices, single runs, and runs of `flwr run`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.output.run_folder import CONFIG, SUMMARY, read_json
from fedbn_flwr.experiments.recipes.schema import read_recipe
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.results.rows import Row, options_of_run, row_of
from fedbn_flwr.plugins.options import UsageError

MATRIX, COMPARISON = "matrix.json", "compare.json"
#: options in which settings differ: their runs share no picture, and no difference is taken
OF_SETTINGS = ("dataset", "model", "partition", "clients", "rounds")
#: options in which the seeds of one method differ
OF_SEEDS = ("seed", "results-dir", "resume", "checkpoint-every", "device", "workers")


def is_matrix(folder: Path) -> bool:
    """Whether `reproduce` wrote it."""
    return (folder / MATRIX).is_file()


def is_comparison(folder: Path) -> bool:
    """Whether `compare` wrote it."""
    return (folder / COMPARISON).is_file() or any(folder.glob(f"*-seed*/{CONFIG}"))


def read_matrix(folder: Path) -> tuple[str, list[Row], Paper, str, bool]:
    """Return the title, the rows, what the paper says, the command, and whether it ran in small."""
    try:
        asked = json.loads((folder / MATRIX).read_text())
        title, only, seeds, rounds, command = (asked[key] for key in ("recipe", "only", "seeds", "rounds", "command"))
        recipe = read_recipe(str(folder / "recipe.yaml"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{folder / MATRIX} is not the record of a matrix: {error}") from error
    recipe = recipe.in_small() if asked["smoke"] else recipe
    recipe = recipe.only(only) if only else recipe
    done = {
        (*entry["labels"].values(), entry["label"], run.get("seed")): run
        for entry in read_json(folder / "results.json") or []
        for run in entry["runs"]
    }
    rows = list[Row]()
    for setting, label in recipe.study.cells():
        for seed in range(seeds):
            place = folder / (_name(setting.name) or "runs") / f"{_name(recipe.study.methods[label])}-seed{seed}"
            named = {"label": label, "method": recipe.study.methods[label], "seed": seed}
            summary = done.get((*setting.labels.values(), label, seed), {})
            rows.append(row_of(place, _ended(place, summary), setting=setting.name, labels=setting.labels, **named))
    return title, rows, replace(recipe.paper, rounds=rounds), command, asked["smoke"]


def read_comparison(folder: Path) -> list[Row]:
    """Return the rows of the runs that are in its table, were planned, or have begun."""
    path = folder / COMPARISON
    table = read_json(path) if path.exists() else []
    if not isinstance(table, list) or not all(isinstance(entry, dict) and "method" in entry for entry in table):
        raise UsageError(f"{path} is not the result of a comparison")
    planned = [{"method": method, "seed": seed} for method, seed in read_json(folder / "planned.json") or []]
    entries = {f"{_name(each['method'])}-seed{each.get('seed', 0)}": each for each in [*planned, *table]}
    begun = (path.parent.name for path in sorted(folder.glob(f"*-seed*/{CONFIG}")))
    return _with_settings([_named(folder / name, entries.get(name, {})) for name in dict.fromkeys([*entries, *begun])])


def read_runs(folders: Sequence[Path]) -> list[Row]:
    """Return the rows of runs that are no study; runs of one method are its seeds only if nothing else differs."""
    runs = _with_settings([_named(folder, {}) for folder in folders])
    differing = {(row["method"], _text_without(options_of_run(row), OF_SEEDS + OF_SETTINGS)) for row in runs}
    places = {(row["method"], row["setting"], row["seed"]) for row in runs}
    alike = len(places) == len(runs) and len(differing) == len({row["method"] for row in runs})
    if alike and all(map(options_of_run, runs)):
        return runs
    return [{**row, "label": Path(row["folder"]).resolve().name} for row in runs]


def _named(place: Path, entry: Row) -> Row:
    options = (read_json(place / CONFIG) or {}).get("options", {})
    method, seed = (entry.get(key, options.get(key)) for key in ("method", "seed"))
    return row_of(
        place, _ended(place, entry), label=method or place.name, method=method or place.name, seed=int(seed or 0)
    )


def _ended(place: Path, entry: Row) -> Row | None:
    """Return what is known of the end of a run, of which a table tells why it failed without files."""
    own = read_json(place / SUMMARY)
    return {**entry, **own} if isinstance(own, dict) else entry if "error" in entry else None


def _with_settings(rows: Sequence[Row]) -> list[Row]:
    """Return rows with a setting for each data set, model, ..., named by what differs between settings.

    The first run tells what a method names itself, and what the centralized reference and waiting runs do not say.
    """
    options = [options_of_run(row) for row in rows]
    first = next((each for each in options if each and each.get("partition") != "union"), options[0])
    values = []
    for own in options:
        pooled = ("partition", "clients") if own.get("partition") == "union" else ()
        shared = [key for key in OF_SETTINGS if not own or key in pooled or f":{key}=" in str(own.get("method"))]
        values.append({**own, **{key: first.get(key) for key in shared}})
    differing = [key for key in OF_SETTINGS if len({each.get(key) for each in values}) > 1]
    settings = list[Row]()
    for row, each in zip(rows, values, strict=True):
        parts = [f"{each[key]} {key}" if isinstance(each.get(key), int) else str(each.get(key)) for key in differing]
        labels = {"setting": ", ".join(parts)} if parts else {}
        settings.append({**row, "setting": ", ".join(parts), "labels": labels})
    return settings


def _text_without(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    return json.dumps({key: value for key, value in options.items() if key not in keys})


def _name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "+-=." else "_" for letter in text)
