"""The runs of a recipe: every cell that is not finished yet, in this process or several side by side.

A cell is a method in a setting, with all seeds and, where the recipe has a grid, the runs of the choice.
Each run has the folder that `fedbn-flwr run` writes. The folder of a setting is that of a comparison.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedbn_flwr.data.prefetch import serve_parent
from fedbn_flwr.experiments.choice import SEEDS
from fedbn_flwr.experiments.comparison import Plan, folder_name, plot_comparison, run_method, write_comparison
from fedbn_flwr.experiments.engines import NEEDED
from fedbn_flwr.experiments.kept_run import KeptRun, keeping
from fedbn_flwr.experiments.output.recorder import Summary
from fedbn_flwr.experiments.output.run_folder import make_folder, write_json
from fedbn_flwr.experiments.recipes.recipe import Recipe, Setting
from fedbn_flwr.experiments.resources import load_data, shared_model
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.simulation.processes.worker import preload
from fedbn_flwr.state.record_files import write_bytes

#: in the folder of a matrix: a copy of the recipe's file, what was asked for, and the results so far
RECIPE, MATRIX, RESULTS = "recipe.yaml", "matrix.json", "results.json"


@dataclass(frozen=True)
class Cell:
    """One method in one setting of a recipe."""

    setting: Setting
    #: the method's label and text
    label: str
    method: str
    plan: Plan
    folder: Path

    @property
    def name(self) -> str:
        """The method and the setting, by their labels."""
        return f"{self.label} | {self.setting.name}" if self.setting.name else self.label

    def run(self) -> list[Summary]:
        """Run what is not finished; an error of a run becomes its summary."""
        return list(run_method(self.plan, self.method, self.folder, lambda _: None))

    def runs(self) -> list[KeptRun]:
        """Return the runs, a seed each, with their folders; what a grid chooses is not known yet."""
        return self.plan.runs(self.folder, self.method)


@dataclass
class Results:
    """The summaries of a recipe's runs, by setting and method label."""

    recipe: Recipe
    runs: dict[tuple[str, str], list[Summary]] = field(default_factory=dict)

    def finished(self, setting: str, method: str) -> list[Summary]:
        """Return the runs of a cell that came to their end."""
        return [summary for summary in self.runs.get((setting, method), []) if "error" not in summary]

    def failures(self) -> dict[tuple[str, str], Summary]:
        """Return the record of a run that failed, for each cell that has one."""
        return {cell: run for cell, runs in self.runs.items() for run in runs if "error" in run}


@dataclass(frozen=True)
class MatrixRecord:
    """What `fedbn-flwr reproduce` was asked for."""

    recipe: str
    #: whether the recipe runs in small
    smoke: bool
    #: the labels of the part that runs; empty means all
    only: Sequence[str]
    seeds: int
    #: rounds of the recipe at full size
    rounds: int
    command: str

    def write(self, folder: Path, source: Path) -> None:
        """Write the record and a copy of the recipe's file, before the first cell runs."""
        write_bytes(make_folder(folder) / RECIPE, source.read_bytes())
        write_json(folder / MATRIX, asdict(self))


def plan_cells(
    recipe: Recipe,
    folder: Path,
    engine: str,
    changes: Mapping[str, Any],
    overwrite: bool = False,
    grid_seeds: int = SEEDS,
) -> list[Cell]:
    """Return the cells of a recipe; `changes` are options that the user gave."""
    cells = []
    for setting, label in recipe.cells():
        # cells are what runs side by side, and the number of processes of one is among what decides its bits
        options = {"workers": 1, **setting.options, **changes}
        method = recipe.methods[label]
        plan = Plan(options, [method], recipe.seeds, recipe.grid, grid_seeds, engine, overwrite)
        cells.append(Cell(setting, label, method, plan, setting_folder(folder, setting)))
    return cells


def setting_folder(folder: Path, setting: Setting) -> Path:
    """Return the folder of a setting's runs inside that of the matrix."""
    return folder / (folder_name(setting.name) or "runs")


def check_resources(recipe: Recipe, cells: Sequence[Cell]) -> None:
    """Refuse a recipe of whose data sets or models one cannot be had here; a UsageError of one line names it."""
    seen = set()
    for cell in cells:
        config = replace(cell.plan.experiment(cell.method, 0).config, method="", seed=0, partition="")
        kinds = (config.dataset, config.image_size, config.data_root, config.model)
        if kinds in seen:
            continue
        seen.add(kinds)
        small = " (--smoke runs it in small on embedded data)" if recipe.small else ""
        try:
            load_data(config)
        except (ValueError, OSError, RuntimeError) as error:
            raise UsageError(f"recipe {recipe.name} needs the data set {config.dataset!r}{small}: {error}") from error
        try:
            shared_model(config)
        except (ValueError, OSError) as error:
            raise UsageError(f"recipe {recipe.name} needs the model {config.model!r}{small}: {error}") from error


def run_matrix(
    recipe: Recipe, cells: Sequence[Cell], folder: Path, workers: int, record: Callable[[Path], None]
) -> Iterator[tuple[Cell, Results]]:
    """Run all cells; after each return the cell with the results so far, and write these into `results.json`.

    `record` writes into the folder what the matrix is, before the first cell runs.
    """
    results = Results(recipe)
    with keeping(folder, [run for cell in cells for run in cell.runs()]):
        record(folder)
        # what an earlier process has finished is shown from the start
        for cell in cells:
            summaries = [summary for run in cell.runs() if (summary := run.finished()) is not None]
            if len(summaries) == cell.plan.seeds:
                results.runs[cell.setting.name, cell.label] = summaries
        _write_results(results, folder)
        pairs = _run_side_by_side(cells, workers) if workers > 1 else ((cell, cell.run()) for cell in cells)
        for cell, summaries in pairs:
            results.runs[cell.setting.name, cell.label] = summaries
            _write_results(results, folder)
            yield cell, results
        # what `fedbn-flwr compare` writes, in the folder of each setting
        for place in dict.fromkeys(cell.folder for cell in cells):
            runs = (results.runs[cell.setting.name, cell.label] for cell in cells if cell.folder == place)
            done = list(chain.from_iterable(runs))
            write_comparison(done, place)
            plot_comparison(done, place)


def _run_side_by_side(cells: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, list[Summary]]]:
    """Run the cells in so many processes at once; return each with its result, in the order in which they end."""
    preload(NEEDED)
    ahead, running = deque(cells), dict[Connection, tuple[Cell, BaseProcess]]()
    try:
        while ahead or running:
            while ahead and len(running) < workers:
                cell = ahead.popleft()
                connection, process = _start(cell)
                running[connection] = cell, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                cell, process = running.pop(ready)
                yield cell, _result(ready, process, cell)
    finally:
        for connection, (_, process) in running.items():
            connection.close()
            process.kill()


def _start(cell: Cell) -> tuple[Connection, BaseProcess]:
    # never a copy of this process, in which torch may have started threads
    context = get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, cell, logging.getLogger("flwr").level), daemon=False)
    process.start()
    there.close()
    return here, process


def _result(connection: Connection, process: BaseProcess, cell: Cell) -> list[Summary]:
    try:
        result: list[Summary] = connection.recv()
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}"
        return [{"method": cell.method, "seed": 0, "error": reason}]
    finally:
        connection.close()
    process.join()
    return result


def _work(connection: Connection, cell: Cell, level: int) -> None:
    serve_parent()
    logging.getLogger("flwr").setLevel(level)
    connection.send(cell.run())


def _write_results(results: Results, folder: Path) -> None:
    """Write `results.json`, which is whole at every moment: a report may be reading it."""
    settings = {setting.name: setting for setting in results.recipe.settings}
    rows = [
        {"labels": dict(settings[setting].labels), "label": method, "runs": summaries}
        for (setting, method), summaries in results.runs.items()
    ]
    write_json(folder / RESULTS, rows)
