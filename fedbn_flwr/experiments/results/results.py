"""The results of runs, for Python: a table, a picture, curves, paired differences and models."""

import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbn_flwr import state
from fedbn_flwr.data.own_data import preprocess
from fedbn_flwr.experiments.given_objects import Method, method_of
from fedbn_flwr.experiments.method import Experiment
from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.experiments.output.run_folder import NOT_WHOLE
from fedbn_flwr.experiments.resources import fresh_model, load_data, normalization
from fedbn_flwr.experiments.results.pictures import plot_curves
from fedbn_flwr.experiments.results.rows import (
    Row,
    finished,
    frame_of,
    rounds_of,
    row_of,
    score_of,
    title_of,
    typical,
)
from fedbn_flwr.experiments.results.show import html, show_comparison, show_run
from fedbn_flwr.experiments.results.table import table
from fedbn_flwr.experiments.results.values import Value, compared
from fedbn_flwr.models import read_weights
from fedbn_flwr.plugins.options import UsageError

#: a method as text, and a seed
Key = tuple[str, int]


class Results:
    """Runs of one or several methods, as they stand in a folder.

    Shown as a table, in a notebook too. Each run's `summary`, the record of its end, is a dictionary.
    """

    def __init__(
        self,
        folder: Path,
        summaries: Sequence[Row],
        places: Mapping[Key, Path],
        experiments: Sequence[Experiment],
        is_kept: bool = True,
    ) -> None:
        #: where the runs are; without a folder of your own, it lives as long as this object
        self.folder = folder
        self.summaries = list(summaries)
        self._places = places
        #: a row for each run
        self.rows = [
            row_of(places[_key(each)], each, label=each["method"], method=each["method"], seed=each["seed"])
            for each in summaries
        ]
        self._experiments = {(each.config.method, each.config.seed): each for each in experiments}
        if not is_kept:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def failures(self) -> dict[Key, str]:
        """Why runs failed, by method and seed; empty if none did."""
        return {_key(row): row["error"] for row in self.rows if row["error"]}

    @property
    def differences(self) -> dict[str, Value]:
        """The mean score of each method, and its mean difference to the first one.

        Differences are paired by seed; `half_width` is half the width of their 95 % interval.
        """
        runs, score, numbers = finished(self.rows), score_of(self.rows), dict[str, dict[int, float]]()
        for row in runs:
            if row.get(score) is not None:
                numbers.setdefault(row["method"], {})[row["seed"]] = row[score]
        return compared(numbers)

    def curves(self, quantity: str = "") -> dict[Key, dict[int, float]]:
        """Return a quantity by method and seed, and there by round; by default the score.

        `pandas.DataFrame(results.curves())` has a row for each round and a column for each run. A ValueError lists what
        is recorded.
        """
        quantity = quantity or score_of(self.rows)
        rounds = {_key(row): rounds_of(row) for row in finished(self.rows)}
        recorded = {name for each in rounds.values() for row in each for name in row} - {"round"}
        if recorded and quantity not in recorded:
            raise UsageError(f"no run has recorded {quantity!r}; recorded: {', '.join(sorted(recorded))}")
        return {
            key: {row["round"]: row[quantity] for row in each if row.get(quantity) is not None}
            for key, each in rounds.items()
        }

    def model(self, method: Method = "", seed: int | None = None) -> nn.Module:
        """Return the model that a run has trained, in evaluation mode; by default that of the first run.

        It takes inputs as training had them: `preprocess` makes them. A method with a model for each node is a
        UsageError.
        """
        key = self._key_of(method, seed)
        model = fresh_model(self._experiments[key].config)
        state.load(model, read_weights(self._places[key] / "model.safetensors"))
        return model.eval()

    def preprocess(self, method: Method = "", seed: int | None = None) -> Callable[[Any], Tensor]:
        """Return a function that turns raw inputs, tensors or arrays, into those that a run's model takes."""
        config = self._experiments[self._key_of(method, seed)].config
        trained = load_data(config).train.inputs
        return partial(preprocess, trained=trained, image_size=config.image_size, **normalization(config))

    def _key_of(self, method: Method, seed: int | None) -> Key:
        text = method_of(method) if method != "" else str(self.summaries[0]["method"])
        runs = [_key(run) for run in finished(self.rows) if run["method"] == text and seed in (None, run["seed"])]
        known = [key for key in runs if key in self._experiments]
        if not known:
            names = ", ".join(f"{name!r} (seed {number})" for name, number in self._experiments)
            raise UsageError(f"there is no model of {text!r}{'' if seed is None else f', seed {seed}'}; of: {names}")
        if self._experiments[known[0]].strategy_class.personal:
            raise UsageError(f"{text!r} has a model for each node, and results hold no node's: {NOT_WHOLE}")
        return known[0]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each run, as `rows` of a folder."""
        return frame_of(self.rows)

    def plot(self) -> Any:
        """Draw the score and the loss over the rounds; return a `matplotlib.figure.Figure`, which a notebook shows.

        Its lines and labels can be changed, and `save` writes it in the form that a file's ending names. A UsageError
        says so if no run has finished.
        """
        if not (runs := finished(self.rows)):
            raise UsageError(f"{self.folder} has no picture: no run has finished")
        curves: dict[str, list[list[dict[str, Any]]]] = {}
        for row in runs:
            curves.setdefault(row["method"], []).append(rounds_of(row))
        return plot_curves(curves, title_of(typical(runs)), score_of(runs))

    def show(self) -> None:
        """Print the table of the runs; of a single run its numbers."""
        if str(self.folder) == self.rows[0]["folder"]:
            show_run(self.summaries[0], self.folder)
        else:
            show_comparison(self.rows, self.folder)

    def __repr__(self) -> str:
        with console.capture() as shown:
            self.show()
        return shown.get().rstrip("\n")

    def _repr_html_(self) -> str:
        return html(table(self.rows))


def _key(run: Row) -> Key:
    return str(run["method"]), int(run["seed"])
