"""The commands `fedbn-flwr recipes` and `fedbn-flwr reproduce`."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedbn_flwr.client import pick_device
from fedbn_flwr.experiments.choice import metric_of
from fedbn_flwr.experiments.engines import engine_named
from fedbn_flwr.experiments.material import expected_steps, load_data, rounds_within_budget
from fedbn_flwr.experiments.output.console import console, new_table, percent
from fedbn_flwr.experiments.output.recorder import Summary
from fedbn_flwr.experiments.output.run_folder import command_line
from fedbn_flwr.experiments.recipes.schema import read_recipe, recipe_names
from fedbn_flwr.experiments.results.rows import outcome_of, read_parts
from fedbn_flwr.experiments.results.show import show_part
from fedbn_flwr.experiments.results.values import is_share
from fedbn_flwr.experiments.runs import Run, keeping
from fedbn_flwr.experiments.study import Setting, cells_of, checked, execute, write_study
from fedbn_flwr.plugins.options import UsageError, whole_number
from fedbn_flwr.strategies import CannotTrainError

#: options of a run that may be given to all runs of a recipe
CHANGES = ("data-root", "device", "precision", "log-to", "workers", "plugins")
#: data sets that are not looked for in a dry run, as that would download them
REMOTE = "hf:"


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
    small, only = bool(options.get("smoke")), options.get("only")
    recipe = full.in_small() if small else full
    recipe = recipe.only(only) if only else recipe
    # what runs side by side has a process each, and the number of processes of a run is among what decides its bits
    given = {"workers": 1, **{key: options[key] for key in CHANGES if key in options}}
    settings = [Setting(setting.labels, {**setting.options, **given}) for setting in recipe.study.settings]
    study = replace(
        recipe.study,
        settings=settings,
        seeds=whole_number("--seeds", options.get("seeds", recipe.study.seeds)),
        grid_seeds=whole_number("--grid-seeds", options.get("grid-seeds", recipe.study.grid_seeds)),
        engine=engine_named(options.get("engine") or str(recipe.study.engine)),
    )
    folder = Path(options.get("results-dir") or Path("results", recipe.name.replace("/", "-") + "-smoke" * small))
    side_by_side = whole_number("--side-by-side", options.get("side-by-side", 1))
    try:
        if options.get("dry-run"):
            show_plan(recipe.name, study.runs(folder))
            return
        rounds = full.study.experiment(*full.study.cells()[0], 0).config.rounds
        runs = checked(study, folder, side_by_side)
    except UsageError as error:
        hint = " (--smoke runs it in small on embedded data)" if recipe.small else ""
        raise UsageError(f"recipe {recipe.name}{hint}: {error}") from error
    about: dict[str, Any] = {
        "title": full.name,
        "command": command_line(),
        "engine": study.engine,
        "grid-seeds": study.grid_seeds,
        "recipe": full.content,
    }
    about |= {"smoke": small, "only": only or [], "seeds": study.seeds, "rounds": rounds}
    started, rows = time.perf_counter(), list[tuple[Run, Summary]]()
    with keeping(folder, runs):
        write_study(folder, about, runs)
        for run, summary in execute(runs, lambda _: None, side_by_side):
            rows.append((run, summary))
            left = timedelta(seconds=round((time.perf_counter() - started) / len(rows) * (len(runs) - len(rows))))
            text = f"{len(rows)}/{len(runs)} {run.name}: {_outcome(summary)}, {left} left"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    (part,) = read_parts([folder])
    show_part(part)
    console.print(f"Results: {folder.resolve()} (`fedbn-flwr report` makes a page of them)", soft_wrap=True)
    if all("failed" in summary for _, summary in rows):
        raise CannotTrainError("no run could train")


def _outcome(summary: Summary) -> str:
    score = metric_of(summary)
    if "failed" in summary or summary.get(score) is None:
        return outcome_of(summary)
    return f"{score} {percent(summary[score])} %" if is_share(score) else f"{score} {summary[score]:.4g}"


def show_plan(title: str, runs: Sequence[Run]) -> None:
    """Print what would run and how many steps, and which data are not there."""
    table = new_table(title, "setting", "method", numbers=("runs", "rounds", "client steps"))
    total, missing, cells = 0, dict[str, None](), cells_of(runs)
    for cell in cells:
        config = cell[0].experiment.config
        try:
            pick_device(config.device)
        except ValueError as error:
            raise UsageError(str(error)) from error
        count = len(cell) + sum(map(len, cell[0].tried.values()))
        counted = "?", "?"
        with suppress(ValueError, OSError, RuntimeError):  # they depend on data that are not there
            samples = len(load_data(config).train) if config.local_epochs or config.budget_epochs else 0
            steps = count * expected_steps(config, samples)
            counted = f"{rounds_within_budget(config, config.clients, samples).rounds:,}", f"{steps:,}"
            total += steps
        try:
            if not config.dataset.startswith(REMOTE):
                load_data(config)
        except (ValueError, OSError, RuntimeError) as error:
            missing[f"data set {config.dataset!r} is not there: {error}"] = None
        table.add_row(cell[0].setting, cell[0].label, str(count), *counted)
    console.print(table)
    console.print(f"{len(cells)} cells, {total:,} client steps{' where known' * bool(missing)}", soft_wrap=True)
    for line in missing:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
