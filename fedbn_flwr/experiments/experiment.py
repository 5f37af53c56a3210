"""An experiment: a method with every option resolved, those that follow from data, too."""

import inspect
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from fedbn_flwr.data import DATASETS, PARTITIONS, SITES, Data, leave_out, load
from fedbn_flwr.data.files import TORCHVISION
from fedbn_flwr.data.loading import files_of, forget, root_of
from fedbn_flwr.data.sets.listing import FileList
from fedbn_flwr.experiments.choice import Choice
from fedbn_flwr.experiments.config import Config, DataOptions, shared_options
from fedbn_flwr.experiments.method import Parsed, all_options, own_options, parse, refuse_ignored
from fedbn_flwr.models import LIBRARIES, MODELS, build, published
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import (
    TRUSTED,
    Own,
    did_you_mean,
    is_foreign,
    is_importable,
    load_plugins,
    warn_once,
)
from fedbn_flwr.plugins.options import (
    UsageError,
    Value,
    options_of,
    read_options,
    refusing,
)
from fedbn_flwr.strategies import BaseStrategy, Centralized
from fedbn_flwr.wire import wire_key

#: normalizers whose running statistics only one strategy provides
BOUND_NORMS = {"hbn": "hbn", "static-bn": "heterofl"}
#: keys of a run configuration that are no options of a run's own: its engine, and what becomes of
#: results
ENGINE = "engine"
REUSE = "reuse"
ANEW = "anew"
#: a side of images that two cores can train networks of timm with
SMALL_SIZE = 64
#: files of a data set, and bytes of them, that are read to tell whether it has changed
FILES_READ = 4096
BYTES_READ = 2**28
#: the clients of a run that brings its own, where neither options nor domains say how many
CLIENTS = 5


@dataclass(frozen=True)
class Experiment:
    """A method with every option resolved."""

    config: Config
    #: the name of the strategy
    strategy: str
    strategy_class: type[BaseStrategy]
    options: Mapping[str, Any] = field(default_factory=dict)
    #: what was chosen for this run from a grid, or is to be
    choice: Choice | None = None
    #: what was asked for, as the name of its folder has it; None: it follows from the rest
    asked: Mapping[str, Any] | None = None

    @property
    def files(self) -> dict[str, str]:
        """The digests of files that options name: of a data set, and of weights."""
        data = self.config.data
        initial = Path(self.config.model.init_from).expanduser()
        of_data = _digest(str(data.dataset), root_of(data.data_root))
        digests = dict[str, str]()
        if of_data:
            digests["dataset"] = of_data
        if initial.is_file():
            digests["init-from"] = _content(initial, initial.stat().st_mtime_ns)
        return digests

    @property
    def own(self) -> list[str]:
        """A user's own code and data in the run, in words: nothing here can tell whether they have
        changed.
        """
        config = self.config
        built_in: dict[str, Mapping[str, Any]] = {
            "model": {name: entry.make for name, entry in MODELS.items()},
            "dataset": DATASETS,
            "objective": {},
            "partition": {name: kind.share for name, kind in PARTITIONS.items()},
            "norm": NORMS,
        }
        held = [
            f"{key} {config.get(key)}"
            for key in built_in
            if _is_own(config.get(key), built_in[key])
        ]
        if is_foreign(self.strategy_class):
            held.insert(0, f"method {self.strategy}")
        if config.plugins:
            held.append(f"plugins {config.plugins}")
        return held

    @property
    def bound_here(self) -> str:
        """What another process could not import, such as a notebook's function.

        The text is empty if there is nothing.
        """
        strategy = self.strategy_class
        named = {key: self.config.get(key) for key in ("model", "objective")}
        if is_foreign(strategy) and (not self.config.plugins or not is_importable(strategy)):
            return f"the strategy {strategy.__name__}"
        bound = (
            key
            for key, value in named.items()
            if isinstance(value, Own) and not is_importable(value.target)
        )
        return next((f"the {key} {named[key]!r}" for key in bound), "")

    def make_strategy(self, nodes: int) -> BaseStrategy:
        """The strategy for a federation of so many nodes."""
        config = self.config
        personal = self.strategy_class.personal
        if personal or config.data.dataset == SITES:
            evaluating = 1.0
        else:
            evaluating = config.fraction_evaluate
        if config.fraction_evaluate not in (0.0, evaluating):
            raise UsageError(
                f"method {config.method!r}: all nodes evaluate, whatever fraction-evaluate says"
            )
        # every accuracy, also that of the mean of what nodes keep; sites are not asked to send it
        options = self.options
        if (
            personal
            and config.data.dataset != SITES
            and "mean-personal" in own_options(self.strategy_class)
        ):
            options = {"mean_personal": True, **options}
        with refusing(f"method {config.method!r}: "):
            return self.strategy_class(
                lr_schedule=config.lr_schedule,
                seed=config.seed,
                patience=config.network.node_timeout,
                exchange_timeout=config.network.exchange_timeout or config.network.timeout,
                evaluate_every=config.results.evaluate_every,
                fraction_train=config.fraction_train,
                fraction_evaluate=evaluating,
                min_train_nodes=1,
                min_evaluate_nodes=1 if evaluating else 0,
                min_available_nodes=config.network.min_nodes or nodes,
                **options,
            )

    def to_mapping(self) -> dict[str, Value]:
        """Return every option by its kebab-case key, as it is written in files."""
        return {
            **self.config.to_mapping(),
            **{wire_key(name): value for name, value in self.options.items()},
        }


def _is_own(value: str | Own, built_in: Mapping[str, Any]) -> bool:
    """Return whether the value of an option is a user's own code or data, by object, by name or as
    module:function.
    """
    if isinstance(value, Own):
        return True
    name, colon, _ = value.partition(":")
    if name in built_in:
        return is_foreign(built_in[name])
    return bool(colon) and name not in LIBRARIES


def look_again() -> None:
    """Forget data whose files have changed since they were read, as between two calls in a
    notebook.
    """
    before = dict(_DIGESTS)
    _DIGESTS.clear()
    if any(_digest(*where) != digest for where, digest in before.items()):
        forget()


#: the digests of data sets in their roots, as `_digest` returns them
_DIGESTS: dict[tuple[str, Path], str] = {}


def _digest(dataset: str, root: Path) -> str:
    """Return the digest of a data set's files, as they were when they were looked at."""
    where = (dataset, root)
    if where not in _DIGESTS:
        with suppress(ValueError, OSError):  # said when the data are needed
            _DIGESTS[where] = _digest_files(files_of(dataset, root))
    return _DIGESTS.get(where, "")


def _digest_files(files: FileList) -> str:
    """Return a digest of the names and sizes of files, and of what is in them.

    Of many or large files it is a sample: some of the files, evenly chosen, and of each the middle.
    The digest is empty if there are none.
    """
    if not files.names:
        return ""
    digest = blake2b(digest_size=4)
    every = -(-len(files.names) // FILES_READ)
    share = BYTES_READ * every // len(files.names)
    for number, name in enumerate(files.names):
        path = files.path(number)
        size = os.path.getsize(path)
        digest.update(os.fsencode(f"{name} {size}\n"))
        if number % every == 0:
            with suppress(OSError), open(path, "rb") as file:
                file.seek(max(size - share, 0) // 2)
                digest.update(file.read(share))
    return digest.hexdigest()


@cache
def _content(file: Path, _: int) -> str:
    """Return a fingerprint of a file that was changed at a time."""
    with file.open("rb") as opened:
        return file_digest(opened, "blake2b").hexdigest()[:8]


def resolve(values: Mapping[str, Any], federation: bool = False, read_from: str = "") -> Experiment:
    """Return the experiment of flat options: shared ones, strategies' own ones, and those in the
    method's text.

    With a `federation`, no number of clients means one per node. Of options that are `read_from` a
    file, nothing is imported.
    """
    plugins = str(values.get("plugins", ""))
    if read_from:
        refuse_code(read_from, plugins.split(","))
    import_plugins(plugins)
    shared = shared_options()
    text = shared["method"].read(values.get("method", Config.method))
    method = parse(text)
    own = own_options(method.strategy)
    owned = {**all_options(), **own}
    # the others say what is run, and not how
    inside = {
        **own,
        **{
            key: option
            for key, option in shared.items()
            if key not in ("method", "plugins", "resume")
        },
    }
    with refusing(f"method {text!r}: "):
        refuse_ignored([method], method.options)
    overrides = read_options(f"method {text!r}", inside, method.options.items())
    # in a run configuration every key must exist, and an empty text stands for "not given"
    options = {
        own[key].name: own[key].read(value)
        for key, value in values.items()
        if key in own and value != ""
    }
    options |= {name: value for name, value in overrides.items() if wire_key(name) in own}
    common = {
        key: value
        for key, value in values.items()
        if key not in owned and not (federation and key in (ENGINE, REUSE, ANEW))
    }
    common |= {
        wire_key(name): value for name, value in overrides.items() if wire_key(name) in shared
    }
    config = Config.from_mapping(common)
    if read_from:
        built_in: list[tuple[str | Own, Iterable[str]]] = [
            (config.model.model, LIBRARIES),
            (config.data.dataset, DATASETS),
            (config.model.objective, ()),
        ]
        for value, known in built_in:
            module, colon, _ = str(value).partition(":")
            if colon and module not in known and not isinstance(value, Own):
                refuse_code(read_from, [module])
    config = _with_clients(_with_images(config), federation)
    config = _with_norm(config, method.strategy, options, method.norm)
    experiment = Experiment(config, method.name, method.strategy, options)
    if issubclass(method.strategy, Centralized):
        return _pooled(experiment, method)
    return experiment


def read_data(options: DataOptions) -> Data:
    """Return the data set as it is read: the same arguments give the same object."""
    size = options.image_size or None
    root = options.data_root or None
    workers = options.image_workers
    loaded = load(
        options.dataset,
        image_size=size,
        channels=options.channels,
        root=root,
        image_workers=workers,
    )
    if options.unseen:
        return leave_out(loaded, options.unseen)[0]
    return loaded


def _with_images(config: Config) -> Config:
    """Return the options with the images that the library of the model trained it with, where they
    are not given.
    """
    images = published(config.model.model)
    if images is None:
        return config
    size = images.image_size
    if not config.data.image_size and size > SMALL_SIZE:
        less = f"image-size={SMALL_SIZE} takes {(size / SMALL_SIZE) ** 2:.0f} times less"
        warn_once(
            f"{config.model.model}: images have {size}x{size} pixels, as it was trained with; "
            f"{less}"
        )
    if not config.data.mean:
        config = config.but(mean=images.mean, std=images.std)
    return config.but(
        image_size=config.data.image_size or size, channels=config.data.channels or images.channels
    )


def _with_clients(config: Config, federation: bool) -> Config:
    """Return the options with a partition, and with a number of clients unless a federation has its
    own.
    """
    unknown = not config.data.partition or (
        config.data.partition in ("domain", "city") and not (config.clients or federation)
    )
    known = data_here(config.data) if unknown else None
    train = known.train if known else None
    if train is None or train.domains is None:
        domains = 0
    else:
        domains = len(train.domains.unique())
    classed = "classes"
    if train is not None and train.targets:
        classed = "iid"
    partition = config.data.partition or ("domain" if domains else classed)
    clients = (
        config.clients or len(config.network.sites) or (0 if federation else domains or CLIENTS)
    )
    return config.but(partition=partition, clients=clients)


def data_here(options: DataOptions) -> Data | None:
    """Return the data if they may have domains, or targets that are no classes, and are here."""
    if options.dataset in (SITES, *TORCHVISION):
        return None
    with refusing(), suppress(OSError):  # said when the data are needed
        return read_data(options)
    return None


def import_plugins(modules: str) -> None:
    """Import users' modules, so that the names that they register are known."""
    with refusing():
        load_plugins(modules)


def refuse_code(read_from: str, modules: Iterable[str]) -> None:
    """Refuse modules that a file names, and the user has not named as plugins: what they hold would
    be called.
    """
    new = [name for name in dict.fromkeys(map(str.strip, modules)) if name and name not in TRUSTED]
    if new:
        raise UsageError(
            f"{read_from} names code of {', '.join(new)}; if you trust it, add --plugins "
            f"{','.join(new)}"
        )


def _with_norm(
    config: Config, strategy: type[BaseStrategy], options: Mapping[str, Any], norm: str | None
) -> Config:
    """Return the options with the normalizer, and with the normalizer's options of the types that
    it takes.
    """
    own = strategy.own_norm(options)
    chosen, brought = own or (norm or config.model.norm, {})
    if norm not in (None, chosen):
        raise UsageError(
            f"method {config.method!r}: the strategy sets its own normalizer {chosen!r}"
        )
    if chosen not in NORMS:
        raise UsageError(f"unknown normalizer {chosen!r}; {did_you_mean(chosen, NORMS)}")
    if own is None and chosen in BOUND_NORMS:
        raise UsageError(
            f"normalizer {chosen!r} only works with the strategy {BOUND_NORMS[chosen]!r}"
        )
    # what `build` takes itself, such as groups, has options of its own
    taken = inspect.signature(build).parameters
    known = {key: item for key, item in options_of(NORMS[chosen]).items() if item.name not in taken}
    given = read_options(f"norm-options of {chosen!r}", known, config.model.norm_options)
    for name, value in brought.items():
        if given.setdefault(name, value) != value:
            raise UsageError(
                f"norm-options: {name} is {given[name]!r}, but method {config.method!r} sets it "
                f"to {value!r}"
            )
    return config.but(norm=chosen, norm_options=tuple(given.items()))


def _pooled(experiment: Experiment, method: Parsed) -> Experiment:
    """Return options for one node with all data, on batches as large as all clients' together."""
    config = experiment.config
    if not config.clients:
        raise UsageError(
            f"method {config.method!r} needs clients: the number of clients whose data it unites"
        )
    # `batch-size` inside the method's own text is meant for the one node
    if "batch-size" in method.options:
        together = 1
    else:
        together = config.clients_in_round()
    pooled = config.but(
        clients=1,
        partition="union",
        batch_size=together * config.training.batch_size,
        fraction_train=1.0,
    )
    return replace(experiment, config=pooled)
