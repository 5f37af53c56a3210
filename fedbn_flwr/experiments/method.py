"""Methods: a strategy, its normalizer and its options, written `STRATEGY[+NORM][:key=value]...`."""

import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import file_digest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedbn_flwr.data import DATASETS, PARTITIONS, SITES, Data, leave_out, load
from fedbn_flwr.data.files import TORCHVISION
from fedbn_flwr.experiments.choice import Choice
from fedbn_flwr.experiments.config import Config, DataOptions, shared_options
from fedbn_flwr.models import LIBRARIES, MODELS, build, published
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import (
    TRUSTED,
    Own,
    did_you_mean,
    fingerprint,
    is_foreign,
    is_importable,
    load_plugins,
    same_definition,
    warn_once,
)
from fedbn_flwr.plugins.options import (
    Option,
    UsageError,
    Value,
    as_given,
    option_key,
    options_of,
    read_options,
    read_pairs,
    refusing,
)
from fedbn_flwr.server.constructor_options import constructor_options
from fedbn_flwr.strategies import REGISTRY, BaseStrategy
from fedbn_flwr.wire import wire_key

#: a name with options, a strategy, or a strategy's class
Method = str | BaseStrategy | type[BaseStrategy]
#: normalizers whose running statistics only one strategy provides
BOUND_NORMS = {"hbn": "hbn", "static-bn": "heterofl"}
#: constructor arguments of strategies that follow from the shared options
SHARED = ("lr_schedule", "seed", "patience", "exchange_timeout", "evaluate_every")
#: keys of a run configuration that are no options of a run's own: its engine, and what becomes of
#: results
ENGINE = "engine"
REUSE = "reuse"
ANEW = "anew"
#: a side of images that two cores can train networks of timm with
SMALL_SIZE = 64
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
        """The digests of files that options name: images of a folder by names and sizes, weights by
        their content.
        """
        initial = Path(self.config.model.init_from).expanduser()
        listed = _listing(str(self.config.data.dataset))
        digests = dict[str, str]()
        if listed:
            digests["dataset"] = listed
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


class Parsed(NamedTuple):
    """A method, taken apart."""

    name: str
    strategy: type[BaseStrategy]
    #: None where the method names none
    norm: str | None
    #: by key, text or values
    options: Mapping[str, Any]


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


@cache
def _listing(dataset: str) -> str:
    """Return a fingerprint of the names and sizes of the files of `folder:PATH`, which a process
    reads once.
    """
    kind, _, path = dataset.partition(":")
    folder = Path(path).expanduser()
    if kind != "folder" or not folder.is_dir():
        return ""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    # by how a folder without a test split is divided
    return fingerprint(
        "\n".join(
            ["names", *(f"{file.relative_to(folder)} {file.stat().st_size}" for file in files)]
        )
    )


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
    text = values.get("method", Config.method)
    method = parse(text)
    own = own_options(method.strategy)
    owned = {**all_options(), **own}
    shared = shared_options()
    # the others say what is run, and not how
    inside = {
        **own,
        **{
            key: option
            for key, option in shared.items()
            if key not in ("method", "plugins", "resume")
        },
    }
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
    if method.strategy.one_node:
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
    if train is not None and train.labels.is_floating_point():
        classed = "iid"
    partition = config.data.partition or ("domain" if domains else classed)
    clients = (
        config.clients or len(config.network.sites) or (0 if federation else domains or CLIENTS)
    )
    return config.but(partition=partition, clients=clients)


def data_here(options: DataOptions) -> Data | None:
    """Return the data if they may have domains or float targets, and are here."""
    if options.dataset in (SITES, *TORCHVISION):
        return None
    with refusing(), suppress(OSError):  # said when the data are needed
        return read_data(options)
    return None


@cache
def own_options(strategy: type[BaseStrategy]) -> Mapping[str, Option]:
    """Return the options that a strategy's constructors declare, by kebab-case key."""
    options = constructor_options(strategy)
    return MappingProxyType(
        {option_key(name): each for name, each in options.items() if name not in SHARED}
    )


def all_options() -> dict[str, Option]:
    """Return the options of all strategies; where several share one, as the first of them has
    it.
    """
    options: dict[str, Option] = {}
    for name, strategy in REGISTRY.items():
        refuse_taken(name, strategy)
        for key, option in own_options(strategy).items():
            options.setdefault(key, option)
    return options


def owners(key: str) -> list[str]:
    """Return the names of the strategies that have an option."""
    return [name for name, strategy in REGISTRY.items() if key in own_options(strategy)]


def forms_of(key: str) -> dict[Option, list[str]]:
    """Return an option as strategies have it, with their names: they may differ in its default and
    its help.
    """
    forms = dict[Option, list[str]]()
    for name in owners(key):
        forms.setdefault(own_options(REGISTRY[name])[key], []).append(name)
    return forms


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


def parse(text: str | Own) -> Parsed:
    """Split `STRATEGY[+NORM][:key=value]...`; of a user's own strategy, return what is known."""
    if isinstance(text, Own):
        method: Parsed = text.target
        return method
    head, *items = text.split(":")
    strategy, plus, norm = head.partition("+")
    if strategy not in REGISTRY:
        raise UsageError(f"unknown strategy {strategy!r}; {did_you_mean(strategy, REGISTRY)}")
    if plus and norm not in NORMS:
        raise UsageError(f"unknown normalizer {norm!r}; {did_you_mean(norm, NORMS)}")
    options = dict(read_pairs(f"method {text!r}", _rejoined(items)))
    return Parsed(strategy, REGISTRY[strategy], norm if plus else None, options)


def method_of(given: Method) -> str | Own:
    """Return a method as text, or a strategy of a user's own with its name.

    A strategy stands for its class and the arguments that it was made with: each run makes one of
    its own.
    """
    if isinstance(given, str):
        return given
    strategy = given if isinstance(given, type) else type(given)
    if not issubclass(strategy, BaseStrategy):
        raise UsageError(
            "a method must be a name, or a strategy of fedbn_flwr.strategies or a subclass of "
            f"one, got {strategy.__module__}.{strategy.__qualname__}"
        )
    options = {} if isinstance(given, type) else _arguments(given)
    name = name_of(strategy)
    method: str | Own = Own(name, Parsed(name, strategy, None, {}))
    for key, value in options.items():
        method = with_option(method, key, value)
    return method


def with_option(method: str | Own, key: str, value: Value) -> str | Own:
    """Return a method with one option more."""
    written = str(value).lower() if isinstance(value, bool) else value
    text = f"{method}:{key}={written}"
    if isinstance(method, str):
        return text
    parsed = parse(method)
    return Own(text, parsed._replace(options={**parsed.options, key: value}))


def name_of(strategy: type[BaseStrategy]) -> str:
    """Return the registered name of a strategy, or one made of its class's name."""
    for name, known in REGISTRY.items():
        if known is strategy:
            return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+", "-", strategy.__name__)
    name = words.strip("-").lower()
    if name in REGISTRY and not same_definition(REGISTRY[name], strategy):
        raise UsageError(
            f"strategy {name!r} is there already; @register_strategy gives the class "
            f"{strategy.__name__} another name"
        )
    refuse_taken(name, strategy)
    return name


def refuse_taken(name: str, strategy: type[BaseStrategy]) -> None:
    """Refuse a strategy whose constructor has an option of all commands."""
    for key in own_options(strategy):
        if key in shared_options():
            raise UsageError(
                f"strategy {name!r}: the option {key!r} of its constructor is one of all commands"
            )


def _arguments(strategy: BaseStrategy) -> dict[str, Value]:
    """Return the options that a strategy was made with, by key."""
    positional, named = strategy.made_with
    signature = inspect.signature(type(strategy))
    given = dict[str, Any]()
    for name, value in signature.bind(*positional, **named).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    known = own_options(type(strategy))
    options = dict[str, Value]()
    for name, value in given.items():
        key = option_key(name)
        value = as_given(value)
        if value is None and key in known and known[key].default is None:
            continue
        if not isinstance(value, bool | int | float | str):
            raise UsageError(
                f"{type(strategy).__name__}: an experiment cannot write down {name}={value!r}; a "
                "subclass can set it in its constructor"
            )
        options[key] = value
    return options


def split_methods(text: str) -> list[str]:
    """Split a list of methods at its commas, but not at those inside a value
    (`lr-schedule=0.1@0.5,=0.001@freeze`).

    A strategy's name neither starts with a digit nor holds an equals sign or an `@`.
    """
    methods: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if methods and (piece[0].isdigit() or {"=", "@"} & set(piece.partition(":")[0])):
            methods[-1] += f",{piece}"
        else:
            methods.append(piece)
    return methods


def _rejoined(items: list[str]) -> list[str]:
    """Values may hold colons themselves (`partition=classes:2`): a piece without `=` belongs to the
    one before.
    """
    joined: list[str] = []
    for item in items:
        if joined and "=" not in item:
            joined[-1] += f":{item}"
        else:
            joined.append(item)
    return joined


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
