"""Methods: a strategy, its normalizer and its options, written `STRATEGY[+NORM][:key=value]...`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedbn_flwr.data import SITES
from fedbn_flwr.experiments.config import Config, UsageError, Value, convert
from fedbn_flwr.experiments.norm_options import add_norm_options
from fedbn_flwr.experiments.strategy_options import all_options, own_options
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import load_plugins
from fedbn_flwr.strategies import REGISTRY, BaseStrategy
from fedbn_flwr.wire import wire_key

#: normalizers whose running statistics only one strategy provides
BOUND_NORMS = {"hbn": "hbn", "static-bn": "heterofl"}


@dataclass(frozen=True)
class Experiment:
    """A method with every option resolved."""

    config: Config
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def strategy_class(self) -> type[BaseStrategy]:
        """The strategy behind the name."""
        return REGISTRY[self.strategy]

    def make_strategy(self, nodes: int) -> BaseStrategy:
        """The strategy for a federation of so many nodes."""
        config, personal = self.config, self.strategy_class.personal
        evaluating = 1.0 if personal or config.dataset == SITES else config.fraction_evaluate
        try:
            return self.strategy_class(
                lr_schedule=config.lr_schedule,
                seed=config.seed,
                patience=config.node_timeout,
                exchange_timeout=config.exchange_timeout or config.timeout,
                evaluate_every=config.evaluate_every,
                fraction_train=config.fraction_train,
                fraction_evaluate=evaluating,
                min_train_nodes=1,
                min_evaluate_nodes=1 if evaluating else 0,
                min_available_nodes=config.min_nodes or nodes,
                **{**self._diagnostics(), **self.options},
            )
        except ValueError as error:
            raise UsageError(f"method {config.method!r}: {error}") from None

    def _diagnostics(self) -> dict[str, bool]:
        """Report every accuracy, also that of the mean of what nodes keep; sites are not asked to send it."""
        strategy, at_sites = self.strategy_class, self.config.dataset == SITES
        reported = strategy.personal and "mean-personal" in own_options(strategy) and not at_sites
        return {"mean_personal": True} if reported else {}

    def to_mapping(self) -> dict[str, Value]:
        """Return every option by its kebab-case key; the method as it was written."""
        return {**self.config.to_mapping(), **{wire_key(name): value for name, value in self.options.items()}}


def resolve(values: Mapping[str, Any]) -> Experiment:
    """Return the experiment of flat options: shared ones, strategies' own ones, and those in the method's text."""
    import_plugins(str(values.get("plugins", "")))
    owned = all_options()
    shared = {key: value for key, value in values.items() if key not in owned}
    # in a run configuration every key must exist, and an empty text stands for "not given"
    given = {key: value for key, value in values.items() if key in owned and value != ""}
    method = str(shared.get("method", Config.method))
    strategy, norm, overrides = parse(method)
    own = own_options(REGISTRY[strategy])
    for key in overrides:
        if key in ("method", "plugins", "resume") or (key not in own and key not in Config().to_mapping()):
            raise UsageError(
                f"method {method!r}: unknown option {key!r}; its own are: {', '.join(own) or 'none'}; shared ones: "
                f"{', '.join(Config().to_mapping())}"
            )
    shared |= {key: value for key, value in overrides.items() if key not in own}
    given |= {key: value for key, value in overrides.items() if key in own}
    options = {own[key].name: convert(key, value, own[key].kind) for key, value in given.items() if key in own}
    config = _with_norm(Config.from_mapping(shared), REGISTRY[strategy], options, norm)
    return _pooled(Experiment(config, strategy, options))


def import_plugins(modules: str) -> None:
    """Import users' modules, so that the names that they register are known."""
    try:
        load_plugins(modules)
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse(method: str) -> tuple[str, str | None, dict[str, str]]:
    """Split `STRATEGY[+NORM][:key=value]...`."""
    head, *items = method.split(":")
    strategy, plus, norm = head.partition("+")
    if strategy not in REGISTRY:
        raise UsageError(f"unknown strategy {strategy!r}; known: {', '.join(REGISTRY)}")
    if plus and norm not in NORMS:
        raise UsageError(f"unknown normalizer {norm!r}; known: {', '.join(NORMS)}")
    options = {}
    for item in _rejoined(items):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"method {method!r}: {item!r} is not of the form key=value")
        options[key] = value
    return strategy, norm if plus else None, options


def split_methods(text: str) -> list[str]:
    """Split a list of methods at its commas, but not at those inside a value (`lr-schedule=0.1@0.5,=0.001@freeze`).

    A strategy's name neither starts with a digit nor holds an equals sign.
    """
    methods: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if methods and (piece[0].isdigit() or "=" in piece.partition(":")[0]):
            methods[-1] += f",{piece}"
        else:
            methods.append(piece)
    return methods


def _rejoined(items: list[str]) -> list[str]:
    """Values may hold colons themselves (`partition=classes:2`): a piece without `=` belongs to the one before."""
    joined: list[str] = []
    for item in items:
        if joined and "=" not in item:
            joined[-1] += f":{item}"
        else:
            joined.append(item)
    return joined


def _with_norm(config: Config, strategy: type[BaseStrategy], options: Mapping[str, Value], norm: str | None) -> Config:
    own = strategy.own_norm(options)
    if own is not None:
        if norm not in (None, own[0]):
            raise UsageError(f"method {config.method!r}: the strategy brings its own normalizer {own[0]!r}")
        options_text = add_norm_options(config.norm_options, own[1], f"method {config.method!r}")
        return replace(config, norm=own[0], norm_options=options_text)
    chosen = norm or config.norm
    if chosen not in NORMS:
        raise UsageError(f"unknown normalizer {chosen!r}; known: {', '.join(NORMS)}")
    if chosen in BOUND_NORMS:
        raise UsageError(f"normalizer {chosen!r} only works with the strategy {BOUND_NORMS[chosen]!r}")
    return replace(config, norm=chosen)


def _pooled(experiment: Experiment) -> Experiment:
    """Return options for one node with all data, on batches as large as all clients' together."""
    config = experiment.config
    if not experiment.strategy_class.pooled:
        return experiment
    if not config.clients:
        raise UsageError(f"method {config.method!r} needs clients: the number of clients whose data it unites")
    # `batch-size` inside the method's own text is meant for the one node
    batch_size = config.batch_size
    if "batch-size" not in parse(config.method)[2]:
        batch_size *= max(int(config.clients * config.fraction_train), 1)
    pooled = replace(config, clients=1, partition="union", batch_size=batch_size, fraction_train=1.0)
    return replace(experiment, config=pooled)
