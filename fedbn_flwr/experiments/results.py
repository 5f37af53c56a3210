"""The results of runs, for Python: a table, a picture, curves, paired differences and models."""

import inspect
import re
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbn_flwr import state
from fedbn_flwr.clientapp import export_personal
from fedbn_flwr.data.own_data import OwnData, digest_of, fingerprint_of, own_data, preprocess
from fedbn_flwr.experiments.comparison import Line, lines, metric_of
from fedbn_flwr.experiments.method import Experiment, all_options, own_options, parse
from fedbn_flwr.experiments.output.console import console, show_comparison, show_run
from fedbn_flwr.experiments.output.recorder import Summary
from fedbn_flwr.experiments.output.run_folder import PERSONAL, read_rounds
from fedbn_flwr.experiments.recipes.table import values_of
from fedbn_flwr.experiments.reports.page import html
from fedbn_flwr.experiments.reports.sources import read_sources
from fedbn_flwr.experiments.reports.tables import result_table
from fedbn_flwr.experiments.resources import fresh_model, load_data, node_names, normalization
from fedbn_flwr.models import read_weights
from fedbn_flwr.plugins import Named, extra, fingerprint
from fedbn_flwr.plugins.options import UsageError, as_value, option_key
from fedbn_flwr.state.record_files import SUFFIX, read_records
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, register_strategy

#: a name with options, a strategy, or a strategy's class
Method = str | BaseStrategy | type[BaseStrategy]
#: a name, a function or class that makes a model, or a model
Model = str | Callable[..., nn.Module] | nn.Module
#: a method as text, and a seed
Key = tuple[str, int]


def method_of(given: Method) -> str:
    """Return a method as text; the class of a strategy is registered under its name, unless it has one already.

    A strategy stands for its class and the arguments that it was made with: each run makes one of its own.
    """
    if isinstance(given, str):
        return given
    strategy = given if isinstance(given, type) else type(given)
    if not issubclass(strategy, BaseStrategy):
        raise UsageError(
            "a method must be a name, or a strategy of fedbn_flwr.strategies or a subclass of one, got "
            f"{strategy.__module__}.{strategy.__qualname__}"
        )
    name = _registered(strategy)
    pairs = {} if isinstance(given, type) else _arguments(given)
    text = ":".join([name, *(f"{key}={value}" for key, value in pairs.items())])
    if parse(text).options != pairs:
        raise UsageError(f"{strategy.__name__}: an option's value cannot be written in a method, got {text!r}")
    return text


def model_of(given: Model) -> str:
    """Return a model's name, which holds the function that makes it if it is none of the registered ones."""
    if isinstance(given, str):
        return given
    if isinstance(given, nn.Module):
        held = deepcopy(given)
        state = held.state_dict()
        digest = digest_of([fingerprint(type(held)), held, *state, *state.values()])
        return Named(type(held).__name__, lambda: deepcopy(held), digest)
    if not callable(given):
        raise UsageError(
            "model must be a name, a function or class that makes a torch.nn.Module, or a torch.nn.Module, got "
            f"{type(given).__name__}"
        )
    return Named(getattr(getattr(given, "func", given), "__name__", "model"), given, fingerprint(given))


def dataset_of(given: str | OwnData) -> str:
    """Return a data set's name, which holds the data if they are none of the registered ones."""
    if isinstance(given, str):
        return given
    try:
        data = own_data(given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Named(data.name, data, fingerprint_of(data))


def _registered(strategy: type[BaseStrategy]) -> str:
    for name, known in REGISTRY.items():
        if known is strategy:
            return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+", "-", strategy.__name__)
    name = words.strip("-").lower()
    before = REGISTRY.get(name)
    try:
        register_strategy(name)(strategy)
        all_options()
    except ValueError as error:
        REGISTRY.pop(name) if before is None else REGISTRY.update({name: before})
        raise UsageError(f"{error}; @register_strategy gives the class {strategy.__name__} another name") from error
    return name


def _arguments(strategy: BaseStrategy) -> dict[str, str]:
    """Return the options that a strategy was made with, as they are written in a method."""
    (positional, named), signature = strategy.made_with, inspect.signature(type(strategy))
    given = dict[str, Any]()
    for name, value in signature.bind(*positional, **named).arguments.items():
        given |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    known, texts = own_options(type(strategy)), dict[str, str]()
    for name, value in given.items():
        key = option_key(name)
        if value is None and key in known and known[key].default is None:
            continue
        if not isinstance(value, bool | int | float | str):
            raise UsageError(
                f"{type(strategy).__name__}: an experiment cannot write down {name}={value!r}; a subclass can set it "
                "in its constructor"
            )
        texts[key] = str(as_value(value)).lower() if isinstance(value, bool) else str(as_value(value))
    return texts


class Results:
    """Runs of one or several methods, as they stand in a folder.

    Shown as a table, in a notebook too. Each run's `summary`, the record of its end, is a dictionary.
    """

    def __init__(
        self,
        folder: Path,
        summaries: Sequence[Summary],
        places: Mapping[Key, Path],
        experiments: Sequence[Experiment],
        is_kept: bool = True,
    ) -> None:
        #: where the runs are; without a folder of your own, it lives as long as this object
        self.folder = folder
        self.summaries = list(summaries)
        self._places = places
        self._experiments = {(each.config.method, each.config.seed): each for each in experiments}
        if not is_kept:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def failures(self) -> dict[Key, str]:
        """Why runs failed, by method and seed; empty if none did."""
        return {_key(run): run["error"] for run in self.summaries if "error" in run}

    @property
    def differences(self) -> dict[str, Line]:
        """The mean score of each method, and its mean difference to the first one.

        Differences are paired by seed; `half_width` is half the width of their 95 % interval.
        """
        finished = self._finished
        return {line.method: line for line in lines(finished)} if finished else {}

    def curves(self, quantity: str = "") -> dict[Key, dict[int, float]]:
        """Return a quantity by method and seed, and there by round; by default the score.

        `pandas.DataFrame(results.curves())` has a row for each round and a column for each run. A ValueError lists what
        is recorded.
        """
        quantity = quantity or (metric_of(self._finished[0]) if self._finished else "accuracy")
        rows = {_key(run): read_rounds(self._places[_key(run)]) for run in self._finished}
        if recorded := {name for each in rows.values() for row in each for name in row} - {"round", quantity}:
            found = any(quantity in row for each in rows.values() for row in each)
            if not found:
                raise UsageError(f"no run has recorded {quantity!r}; recorded: {', '.join(sorted(recorded))}")
        return {
            key: {row["round"]: row[quantity] for row in each if row.get(quantity) is not None}
            for key, each in rows.items()
        }

    def model(self, method: Method = "", seed: int | None = None) -> nn.Module:
        """Return the model that a run has trained, in evaluation mode; by default that of the first run.

        It takes inputs as training had them: `preprocess` makes them. A method with a model for each node is a
        UsageError.
        """
        key = self._key_of(method, seed)
        if self._experiments[key].strategy_class.personal:
            raise UsageError(f"{key[0]!r} has a model for each node: `models` returns them")
        return self._filled(key, read_weights(self._places[key] / "model.safetensors"))

    def models(self, method: Method = "", seed: int | None = None) -> dict[int | str, nn.Module]:
        """Return each node's own model, in evaluation mode; by default those of the first run.

        The keys are the nodes' domains if each has one of its own, else their numbers. A node that never trained has
        the server's model. A method with one model for all nodes is a UsageError, and so are nodes elsewhere.
        """
        key = self._key_of(method, seed)
        experiment, folder = self._experiments[key], self._places[key] / PERSONAL
        if not experiment.strategy_class.personal:
            raise UsageError(f"{key[0]!r} has one model for all nodes: `model` returns it")
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is missing: with the engine ray and in deployments nodes keep their models, "
                "of which `export_personal` makes one there"
            )
        weights = read_weights(self._places[key] / "model.safetensors")
        shared, own = state.to_record(weights), dict[int | str, nn.Module]()
        for number, name in enumerate(node_names(experiment.config)):
            file = folder / f"{number}{SUFFIX}"
            kept = state.from_record(export_personal(shared, read_records(file))) if file.exists() else weights
            own[name] = self._filled(key, kept)
        return own

    def _filled(self, key: Key, weights: state.State) -> nn.Module:
        """Return a run's model with these weights."""
        model = fresh_model(self._experiments[key].config)
        state.load(model, weights)
        return model.eval()

    def preprocess(self, method: Method = "", seed: int | None = None) -> Callable[[Any], Tensor]:
        """Return a function that turns raw inputs, tensors or arrays, into those that a run's model takes."""
        config = self._experiments[self._key_of(method, seed)].config
        trained = load_data(config).train.inputs
        return partial(preprocess, trained=trained, image_size=config.image_size, **normalization(config))

    def _key_of(self, method: Method, seed: int | None) -> Key:
        text = method_of(method) if method != "" else str(self.summaries[0]["method"])
        runs = [_key(run) for run in self._finished if run["method"] == text and seed in (None, run["seed"])]
        known = [key for key in runs if key in self._experiments]
        if not known:
            names = ", ".join(f"{name!r} (seed {number})" for name, number in self._experiments)
            raise UsageError(f"there is no model of {text!r}{'' if seed is None else f', seed {seed}'}; of: {names}")
        return known[0]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each run and the columns of its summary."""
        with extra("cli"):
            import pandas

        return pandas.DataFrame(self.summaries)

    def plot(self) -> "Picture":
        """Return the picture of the curves, which a notebook shows; a UsageError if there is none."""
        for name in ("compare.png", "curves.png"):
            if (self.folder / name).exists():
                return Picture((self.folder / name).read_bytes())
        raise UsageError(f"{self.folder} has no picture: no run has finished, or it could not be drawn")

    def __repr__(self) -> str:
        with console.capture() as shown:
            if self.folder in self._places.values():
                show_run(self.summaries[0], self.folder)
            else:
                show_comparison(self.summaries, self.folder)
        return shown.get().rstrip("\n")

    def _repr_html_(self) -> str:
        (source,) = read_sources([self.folder])
        return html("table.html", table=result_table(source, values_of(source.results, 1)))

    @property
    def _finished(self) -> list[Summary]:
        return [run for run in self.summaries if "error" not in run]


class Picture:
    """A picture that a notebook shows."""

    def __init__(self, png: bytes) -> None:
        #: the content of a PNG file
        self.png = png

    def save(self, path: str | Path) -> None:
        """Write a PNG file."""
        Path(path).write_bytes(self.png)

    def _repr_png_(self) -> bytes:
        return self.png


def _key(run: Summary) -> Key:
    return str(run["method"]), int(run["seed"])
