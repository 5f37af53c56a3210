"""The register of strategies, by the name that `--method` takes, and the model that a strategy
needs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from fedbn_flwr import norm
from fedbn_flwr.plugins import add, did_you_mean
from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.server.constructor_options import check_constructor

#: the strategies by name; `register_strategy` adds one
REGISTRY: dict[str, type[BaseStrategy]] = {}

S = TypeVar("S", bound=BaseStrategy)


def register_strategy(name: str) -> Callable[[type[S]], type[S]]:
    """Register a strategy under the name that `--method` takes; used as a class decorator.

    Keyword arguments of the constructor become options of the command, each with its help beside
    it:

        @register_strategy("pull")
        class Pull(FedAvg):
            def __init__(
                self, *, strength: Annotated[float, "how hard clients pull"] = 0.1, **options: Any
            ) -> None:

    A name that another strategy has is a ValueError.
    """

    def register(strategy: type[S]) -> type[S]:
        add(REGISTRY, "strategy", name, strategy)
        return strategy

    return register


def prepare(model: nn.Module, method: str | type[BaseStrategy], **options: Any) -> nn.Module:
    """Return the model with the normalizers that a method brings: FedWon's, HBN's, HeteroFL's;
    others' stay.

    `method` is a strategy, or its name (`fedavg+gn` names a normalizer, too); `options` are those
    of its constructor. The normalizers are replaced in place. The server's initial model and the
    nodes' models are both made so.
    """
    name = kind = ""
    strategy: Any = method
    if isinstance(method, str):
        name, _, kind = method.partition("+")
        if name not in REGISTRY:
            raise ValueError(f"unknown strategy {name!r}; {did_you_mean(name, REGISTRY)}")
        strategy = REGISTRY[name]
    if not isinstance(strategy, type) or not issubclass(strategy, BaseStrategy):
        raise ValueError(f"method must be a name or the class of a strategy, got {method!r}")
    check_constructor(strategy, options)
    own = strategy.own_norm(options)
    if own and kind not in ("", own[0]):
        raise ValueError(f"{name} sets its own normalizer {own[0]!r}, not {kind!r}")
    if kind and not own:
        own = (kind, {})
    if own is None:
        return model
    return norm.replace(model, own[0], **own[1])
