"""The commands `fedbn-flwr recipes` and `fedbn-flwr reproduce`."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from fedbn_flwr.client import pick_device
from fedbn_flwr.experiments.choice import SEEDS
from fedbn_flwr.experiments.engines import ENGINES, engine_named
from fedbn_flwr.experiments.output.console import console, new_table, percent
from fedbn_flwr.experiments.output.run_folder import command_line
from fedbn_flwr.experiments.output.sinks import check_sinks
from fedbn_flwr.experiments.recipes.matrix import Cell, MatrixRecord, Results, check_resources, plan_cells, run_matrix
from fedbn_flwr.experiments.recipes.schema import check_recipe, read_recipe, recipe_names, recipe_path
from fedbn_flwr.experiments.resources import expected_steps, load_data, rounds_within_budget
from fedbn_flwr.experiments.results.folders import read_parts
from fedbn_flwr.experiments.results.rows import metric_of, outcome_of
from fedbn_flwr.experiments.results.show import study_text
from fedbn_flwr.plugins.options import UsageError, whole_number
from fedbn_flwr.strategies import CannotTrainError

#: options of a run that may be given to all runs of a matrix
CHANGES = ("data-root", "device", "precision", "log-to")
#: data sets that are not looked for in a dry run, as that would download them
REMOTE = "hf:"


def add_recipe_commands(commands: Any, command: Any) -> None:
    """Add both commands to the parser; `command` makes one."""
    names = command(commands, "recipes", "list the papers' tables and figures that can be reproduced")
    names.add_argument("--json", action="store_true", help="print it for programs")
    parser: argparse.ArgumentParser = command(commands, "reproduce", "run a recipe: a table, a figure, or your matrix")
    parser.add_argument("recipe", metavar="RECIPE", help="name, as in fixbn/table5, or a file that ends in .yaml")
    parser.add_argument("--smoke", action="store_true", help="run the same cells in small, on embedded data")
    parser.add_argument("--only", action="append", metavar="LABEL", help="only cells with this label; may be repeated")
    parser.add_argument("--workers", metavar="N", help="cells that run side by side, each in a process [1]")
    parser.add_argument(
        "--dry-run", dest="dry-run", action="store_true", help="show what would run, and how many steps"
    )
    parser.add_argument("--seeds", metavar="N", help="runs a method, instead of the recipe's number")
    parser.add_argument("--grid-seeds", dest="grid-seeds", metavar="N", help=f"runs per value of a grid [{SEEDS}]")
    parser.add_argument("--results-dir", dest="results-dir", metavar="DIR", help="where results go [results/NAME]")
    parser.add_argument("--engine", help=f"{', '.join(ENGINES)} [stacked]")
    parser.add_argument("--overwrite", action="store_true", help="replace runs in the folder that differ from these")
    for key in CHANGES:
        parser.add_argument(
            f"--{key}", dest=key, metavar=key.upper().replace("-", "_"), help="as for `run`, for every run"
        )


def list_recipes(options: Mapping[str, Any]) -> None:
    """Print every recipe, by paper and number."""
    rows = [{"name": r.name, "place": r.paper.place, "about": r.paper.about} for r in map(read_recipe, recipe_names())]
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
    check_recipe(full)
    recipe, small = full, bool(options.get("smoke"))
    if small:
        recipe = full.in_small()
    if options.get("only"):
        recipe = recipe.only(options["only"])
    if "seeds" in options:
        recipe = replace(recipe, seeds=whole_number("--seeds", options["seeds"]))
    engine = engine_named(options.get("engine"))
    folder = Path(options.get("results-dir") or Path("results", recipe.name.replace("/", "-") + "-smoke" * small))
    changes = {key: options[key] for key in CHANGES if key in options}
    grid_seeds = whole_number("--grid-seeds", options.get("grid-seeds", SEEDS))
    cells = plan_cells(recipe, folder, engine, changes, bool(options.get("overwrite")), grid_seeds)
    workers = whole_number("--workers", options.get("workers", 1))
    if options.get("dry-run"):
        show_plan(recipe.name, cells)
        return
    check_resources(recipe, cells)
    check_sinks(cells[0].plan.experiment(cells[0].method, 0).config.log_to)
    setting, label = full.cells()[0]
    rounds = full.experiment(setting, label).config.rounds
    only = options.get("only") or ()
    record = MatrixRecord(full.name, small, only, recipe.seeds, rounds, command_line())
    write = partial(record.write, source=recipe_path(str(options["recipe"])))
    started, results = time.perf_counter(), None
    matrix = run_matrix(recipe, cells, folder, workers, write)
    for done, (cell, results) in enumerate(matrix, start=1):
        left = timedelta(seconds=round((time.perf_counter() - started) / done * (len(cells) - done)))
        console.print(f"{done}/{len(cells)} {cell.name}: {_outcome(cell, results)}, {left} left", markup=False)
    assert results is not None
    (part,) = read_parts([folder])
    text = study_text(part.title, part.rows, part.paper)
    (folder / "table.txt").write_text(text)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Results: {folder.resolve()} (table.txt, results.json, a folder a setting)", soft_wrap=True)
    if not any(results.finished(cell.setting.name, cell.label) for cell in cells):
        raise CannotTrainError("no cell could train")


def _outcome(cell: Cell, results: Results) -> str:
    key = (cell.setting.name, cell.label)
    if failure := results.failures().get(key):
        return outcome_of(failure)
    last = results.finished(*key)[-1]
    return f"{metric_of(last)} {percent(last[metric_of(last)])} %"


def show_plan(title: str, cells: Sequence[Cell]) -> None:
    """Print what cells would run and how many steps, and which data are not there."""
    table = new_table(title, "setting", "method", numbers=("runs", "rounds", "client steps"))
    total, missing = 0, dict[str, None]()
    for cell in cells:
        config = cell.plan.experiment(cell.method, 0).config
        try:
            pick_device(config.device)
        except ValueError as error:
            raise UsageError(str(error)) from error
        counted = "?", "?"
        with suppress(ValueError, OSError, RuntimeError):  # they depend on data that are not there
            steps = cell.plan.count(cell.method) * expected_steps(config)
            counted = f"{rounds_within_budget(config, config.clients).rounds:,}", f"{steps:,}"
            total += steps
        try:
            if not config.dataset.startswith(REMOTE):
                load_data(config)
        except (ValueError, OSError, RuntimeError) as error:
            missing[f"data set {config.dataset!r} is not there: {error}"] = None
        table.add_row(cell.setting.name, cell.label, str(cell.plan.count(cell.method)), *counted)
    console.print(table)
    console.print(f"{len(cells)} cells, {total:,} client steps{' where known' * bool(missing)}", soft_wrap=True)
    for line in missing:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
