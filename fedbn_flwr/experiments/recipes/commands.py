"""The commands `fedbn-flwr recipes`, `reproduce` and `list`."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any

from fedbn_flwr.data import AUGMENTATIONS, DATASETS, PARTITIONS
from fedbn_flwr.device import pick_device
from fedbn_flwr.experiments.choice import metric_of
from fedbn_flwr.experiments.engines import engine_named
from fedbn_flwr.experiments.material import expected_steps, load_data, rounds_within_budget
from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.experiments.output.console import console, new_table, percent, say
from fedbn_flwr.experiments.output.recorder import Summary
from fedbn_flwr.experiments.recipes.schema import read_recipe, recipe_names
from fedbn_flwr.experiments.results.rows import outcome_of, read_parts
from fedbn_flwr.experiments.results.show import show_part
from fedbn_flwr.experiments.results.values import is_share
from fedbn_flwr.experiments.runs import Run, keeping
from fedbn_flwr.experiments.study import Setting, cells_of, checked, execute, write_study
from fedbn_flwr.models import MODELS
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError, refusing, whole_number
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, CannotTrainError

#: options of a run that may be given to all runs of a recipe
CHANGES = ("data-root", "device", "precision", "deterministic", "log-to", "workers", "plugins")
#: the column of names is no wider; a longer name moves its own line
WIDEST = 24

#: facts about a name, by column
Row = dict[str, Any]
#: data sets that are not looked for in a dry run, as that would download them
REMOTE = "hf:"


def list_recipes(options: Mapping[str, Any]) -> None:
    """Print every recipe, by paper and number."""
    rows = [
        {"name": r.name, "place": r.paper.place, "about": r.paper.about}
        for r in map(read_recipe, recipe_names())
    ]
    if options.get("json"):
        print(json.dumps(rows, indent=2))
        return
    table = new_table("", "recipe", "in the paper", "about")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(row["name"], row["place"], row["about"])
    console.print(table)


def reproduce(options: Mapping[str, Any]) -> None:
    """Run a recipe, or show what it would run."""
    full = read_recipe(str(options["recipe"]))
    small = bool(options.get("smoke"))
    only = options.get("only")
    recipe = full.in_small() if small else full
    recipe = recipe.only(only) if only else recipe
    # what runs side by side has a process each, and the number of processes of a run is among what
    # decides its bits
    given = {"workers": 1, **{key: options[key] for key in CHANGES if key in options}}
    settings = [
        Setting(setting.labels, {**setting.options, **given}) for setting in recipe.study.settings
    ]
    study = replace(
        recipe.study,
        settings=settings,
        seeds=whole_number("--seeds", options.get("seeds", recipe.study.seeds)),
        grid_seeds=whole_number("--grid-seeds", options.get("grid-seeds", recipe.study.grid_seeds)),
        engine=engine_named(options.get("engine") or str(recipe.study.engine)),
    )
    folder_name = recipe.name.replace("/", "-")
    if small:
        folder_name += "-smoke"
    folder = Path(options.get("results-dir") or Path("results", folder_name))
    side_by_side = whole_number("--side-by-side", options.get("side-by-side", 1))
    try:
        if options.get("dry-run"):
            show_plan(recipe.name, study.runs(folder))
            return
        rounds = full.study.experiment(*full.study.cells()[0], 0).config.rounds
        runs = checked(study, folder, side_by_side)
    except UsageError as error:
        hint = ""
        if recipe.small:
            hint = " (--smoke runs it in small on embedded data)"
        raise UsageError(f"recipe {recipe.name}{hint}: {error}") from error
    started = time.perf_counter()
    rows = list[tuple[Run, Summary]]()
    with keeping(folder, runs, options.get("reuse", False), options.get("anew", False)):
        more = {"smoke": small, "only": only or [], "seeds": study.seeds, "rounds": rounds}
        write_study(folder, study, runs, full.content, title=full.name, **more)
        for run, summary in execute(runs, lambda _: None, side_by_side):
            rows.append((run, summary))
            left = timedelta(
                seconds=round((time.perf_counter() - started) / len(rows) * (len(runs) - len(rows)))
            )
            say([f"{len(rows)}/{len(runs)} {run.name}: {_outcome(summary)}, {left} left"])
    (part,) = read_parts([folder])
    show_part(part)
    say([f"Results: {folder.resolve()} (`fedbn-flwr report` makes a page of them)"])
    if all("failed" in summary for _, summary in rows):
        raise CannotTrainError("no run could train")


def _outcome(summary: Summary) -> str:
    score = metric_of(summary)
    if "failed" in summary or summary.get(score) is None:
        return outcome_of(summary)
    if is_share(score):
        return f"{score} {percent(summary[score])} %"
    return f"{score} {summary[score]:.4g}"


def show_plan(title: str, runs: Sequence[Run]) -> None:
    """Print what would run and how many steps, and which data are not there."""
    table = new_table(title, "setting", "method", numbers=("runs", "rounds", "client steps"))
    total = 0
    missing = dict[str, None]()
    cells = cells_of(runs)
    for cell in cells:
        config = cell[0].experiment.config
        with refusing():
            pick_device(config.engine.device)
        count = len(cell) + sum(map(len, cell[0].tried.values()))
        counted = "?", "?"
        with suppress(ValueError, OSError, RuntimeError):  # they depend on data that are not there
            samples = 0
            if config.training.local_epochs or config.budget_epochs:
                samples = len(load_data(config.data).train)
            steps = count * expected_steps(config, samples)
            counted = (
                f"{rounds_within_budget(config, config.clients, samples).rounds:,}",
                f"{steps:,}",
            )
            total += steps
        try:
            if not str(config.data.dataset).startswith(REMOTE):
                load_data(config.data)
        except (ValueError, OSError, RuntimeError) as error:
            missing[f"data set {config.data.dataset!r} is not there: {error}"] = None
        table.add_row(cell[0].setting, cell[0].label, str(count), *counted)
    console.print(table)
    known = " where known" if missing else ""
    say([f"{len(cells)} cells, {total:,} client steps{known}", *missing])


def listing() -> dict[str, list[Row]]:
    """Return what there is, by kind: the rows of each table, as `list --json` prints them."""
    return {
        "strategies": [_strategy(name, strategy) for name, strategy in REGISTRY.items()],
        "normalizers": [_row(name, swap) for name, swap in NORMS.items()],
        "models": [_row(name, entry.make) for name, entry in MODELS.items()],
        "datasets": [_row(name, read) for name, read in DATASETS.items()],
        "partitions": [
            {**_row(name, kind.share), "form": kind.form} for name, kind in PARTITIONS.items()
        ],
        "augmentations": [_row(name, make) for name, make in AUGMENTATIONS.items()],
    }


def list_names(options: Mapping[str, Any]) -> None:
    """Print a line about each name that an option takes, or all about one name or kind."""
    tables = listing()
    name = options.get("name")
    if options.get("json"):
        print(json.dumps(tables, indent=2))
    elif name:
        known = [row["name"] for rows in tables.values() for row in rows]
        if name not in (*tables, *known):
            raise UsageError(f"unknown name {name!r}; {did_you_mean(name, [*tables, *known])}")
        for kind, rows in tables.items():
            for row in rows:
                if name in (kind, row["name"]):
                    _show_one(row)
    else:
        for kind, rows in tables.items():
            _show_kind(kind, rows)
        say(["`fedbn-flwr list NAME` says more about one of them."])


def _show_kind(kind: str, rows: Sequence[Row]) -> None:
    """Print a line about each name; to a terminal, lines end where it does."""
    console.print(kind, style="bold")
    names = [str(row.get("form") or row["name"]) for row in rows]
    width = max(len(name) for name in names if len(name) <= WIDEST)
    look: dict[str, Any] = {"overflow": "ellipsis"} if console.is_terminal else {"soft_wrap": True}
    for name, row in zip(names, rows, strict=True):
        console.print(f"  {name:<{width}}  {row['about']}", no_wrap=True, **look)
    console.print()


def _show_one(row: Row) -> None:
    texts = {key: row.get(key) for key in ("form", "paper", "options")}
    shown = {
        key: ", ".join(text) if isinstance(text, list) else text
        for key, text in texts.items()
        if text
    }
    say([f"{row['name']}: {row['about']}", *(f"  {key}: {text}" for key, text in shown.items())])


def _strategy(name: str, strategy: type[BaseStrategy]) -> Row:
    # a user's method is not that of the paper of its base
    paper = vars(strategy).get("paper", "")
    return {**_row(name, strategy), "paper": paper, "options": list(own_options(strategy))}


def _row(name: str, thing: Callable[..., object]) -> Row:
    text = getdoc(thing.func if isinstance(thing, partial) else thing) or ""
    return {"name": name, "about": " ".join(text.partition("\n\n")[0].split())}
