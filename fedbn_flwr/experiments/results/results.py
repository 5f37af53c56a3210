"""The results of runs, for Python: a table, a picture, curves, paired differences and models."""

import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbn_flwr import norm, state
from fedbn_flwr.data.own_data import preprocess
from fedbn_flwr.experiments.material import (
    Material,
    data_form,
    fresh_model,
    load_data,
    node_names,
    normalization,
)
from fedbn_flwr.experiments.method import Method, method_of
from fedbn_flwr.experiments.output.console import console, say
from fedbn_flwr.experiments.output.recorder import Summary
from fedbn_flwr.experiments.output.run_folder import PERSONAL
from fedbn_flwr.experiments.results.plots import plot_curves
from fedbn_flwr.experiments.results.rows import (
    Frame,
    column,
    finished,
    pd,
    rounds_of,
    row_of,
    score_of,
)
from fedbn_flwr.experiments.results.show import render, show_comparison
from fedbn_flwr.experiments.results.tables import results
from fedbn_flwr.experiments.results.values import values_of
from fedbn_flwr.experiments.runs import Run
from fedbn_flwr.models import read_weights
from fedbn_flwr.plugins.options import UsageError

#: a method as text, and a seed
Key = tuple[str, int]


class Results:
    """Runs of one or several methods, as they stand in a folder.

    Shown as a table, in a notebook too. Each run's `summary`, the record of its end, is a
    dictionary.
    """

    def __init__(
        self, folder: Path, runs: Sequence[tuple[Run, Summary]], is_kept: bool = True
    ) -> None:
        #: where the runs are; without a folder of your own, it lives as long as this object
        self.folder = folder
        self.summaries = [summary for _, summary in runs]
        #: a row for each run
        self.rows = pd.DataFrame(
            [row_of(run.folder, summary, **run.place) for run, summary in runs]
        )
        self._runs = {_key(run.place): run for run, _ in runs}
        if not is_kept:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def failures(self) -> dict[Key, str]:
        """Why runs failed, by method and seed; empty if none did."""
        return {_key(run): run["error"] for run in self.rows.to_dict("records") if run["error"]}

    @property
    def differences(self) -> dict[str, Any]:
        """The mean score of each method, and its mean difference to the first one.

        Differences are paired by seed; `half_width` is half the width of their 95 % interval.
        """
        score = score_of(self.rows)
        scores = finished(self.rows).assign(
            label=self.rows["method"], column=score, value=column(self.rows, score)
        )
        return {
            each.Index[-1]: each
            for each in values_of(scores.dropna(subset="value")).itertuples(name="Value")
        }

    def curves(self, quantity: str = "") -> dict[Key, dict[int, float]]:
        """Return a quantity by method and seed, and there by round; by default the score.

        `pandas.DataFrame(results.curves())` has a row for each round and a column for each run. A
        ValueError lists what is recorded.
        """
        quantity = quantity or score_of(self.rows)
        ended = finished(self.rows)
        rounds = rounds_of(ended)
        recorded = sorted({*rounds} - {"run", "setting", "label", "seed", "round"})
        if recorded and quantity not in recorded:
            raise UsageError(f"no run has recorded {quantity!r}; recorded: {', '.join(recorded)}")
        values = rounds.assign(value=column(rounds, quantity)).dropna(subset="value")
        lines = {
            run: dict(zip(own["round"], own["value"], strict=True))
            for run, own in values.groupby("run")
        }
        return {_key(run): lines.get(at, {}) for at, run in ended.iterrows()}

    def model(
        self,
        method: Method = "",
        seed: int | None = None,
        adapt: Tensor | Iterable[Any] | None = None,
    ) -> nn.Module:
        """Return the model that a run has trained, in evaluation mode; by default that of the first
        run.

        It takes inputs as training had them: `preprocess` makes them. With `adapt`, raw unlabeled
        inputs of a site that did not take part, it has BN statistics of these, which a model that
        learned under frozen ones cannot use: a warning says so. A method with a model for each node
        is a UsageError without `adapt`; with it, the nodes' mean is adapted.
        """
        key = self._key_of(method, seed)
        if self._runs[key].experiment.strategy_class.personal and adapt is None:
            raise UsageError(
                f"{key[0]!r} has a model for each node: `models` returns them, or `adapt` fits "
                "their mean"
            )
        model = self._filled(key, read_weights(self._runs[key].folder / "model.safetensors"))
        if adapt is None:
            return model
        # refuses a model without statistics, of which there is nothing to warn
        adapted = norm.adapt(model, adapt, preprocess=self.preprocess(*key))
        frozen = (self._runs[key].finished() or {}).get("frozen")
        if frozen in ("statistics", "both") or norm.lacks(model, "statistics"):
            warnings.warn(
                f"{key[0]} trained with frozen statistics: with others, it may fail", stacklevel=2
            )
        return adapted

    def models(self, method: Method = "", seed: int | None = None) -> dict[int | str, nn.Module]:
        """Return each node's own model, in evaluation mode; by default those of the first run.

        The keys are the nodes' domains if each has one of its own, else their numbers. A node that
        never trained has the server's model. A method with one model for all nodes is a UsageError,
        and so are nodes elsewhere.
        """
        key = self._key_of(method, seed)
        experiment = self._runs[key].experiment
        folder = self._runs[key].folder / PERSONAL
        if not experiment.strategy_class.personal:
            raise UsageError(f"{key[0]!r} has one model for all nodes: `model` returns it")
        if not [*folder.glob("*.safetensors")]:
            raise UsageError(
                f"{folder} is missing or empty: with the engine ray and in deployments nodes keep "
                "their models, of which `export_personal` makes one there"
            )
        weights = read_weights(folder.parent / "model.safetensors")
        own = dict[int | str, nn.Module]()
        material = Material.of(experiment.config)
        for number, name in enumerate(node_names(material.data, material.partition)):
            file = folder / f"{number}.safetensors"
            own[name] = self._filled(key, weights | (read_weights(file) if file.exists() else {}))
        return own

    def _filled(self, key: Key, weights: state.State) -> nn.Module:
        """Return a run's model with these weights."""
        config = self._runs[key].experiment.config
        model = fresh_model(config.model, data_form(load_data(config.data)), config.seed)
        state.load(model, weights)
        return model.eval()

    def preprocess(self, method: Method = "", seed: int | None = None) -> Callable[[Any], Tensor]:
        """Return a function that turns raw inputs, tensors or arrays, into those that a run's model
        takes.
        """
        config = self._runs[self._key_of(method, seed)].experiment.config
        split = load_data(config.data).train
        return partial(
            preprocess,
            trained=split.inputs,
            image_size=config.data.image_size,
            **normalization(split),
        )

    def _key_of(self, method: Method, seed: int | None) -> Key:
        if method != "":
            text = str(method_of(method))
        else:
            text = str(self.rows["method"][0])
        for key in map(_key, finished(self.rows).to_dict("records")):
            if key[0] == text and seed in (None, key[1]):
                return key
        names = ", ".join(f"{name!r} (seed {number})" for name, number in self._runs)
        wanted = repr(text)
        if seed is not None:
            wanted += f", seed {seed}"
        raise UsageError(f"there is no model of {wanted}; of: {names}")

    def to_pandas(self) -> Frame:
        """Return a `pandas.DataFrame` with a row for each run, as `rows` of a folder."""
        return self.rows.copy()

    def plot(self) -> Any:
        """Draw the score and the loss over the rounds.

        Return a `matplotlib.figure.Figure`, which a notebook shows.

        Its lines and labels can be changed, and `save` writes it in the form that a file's ending
        names. A UsageError says so if no run has finished.
        """
        return plot_curves(self.rows)

    def show(self) -> None:
        """Print the table of the runs."""
        show_comparison(self.rows)
        say([f"Results: {self.folder.resolve()}"])

    def __repr__(self) -> str:
        with console.capture() as shown:
            self.show()
        return shown.get().rstrip("\n")

    def _repr_html_(self) -> str:
        return render("table.html", table=results(self.rows))


def _key(run: Mapping[str, Any]) -> Key:
    return str(run["method"]), int(run["seed"])
