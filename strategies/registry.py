"""The register of strategies, by the name that `--method` takes."""

from collections.abc import Callable
from typing import TypeVar

from fedbn_flwr.plugins import add
from fedbn_flwr.server.base_strategy import BaseStrategy

#: the strategies by name; `register_strategy` adds one
REGISTRY: dict[str, type[BaseStrategy]] = {}

S = TypeVar("S", bound=BaseStrategy)


def register_strategy(name: str) -> Callable[[type[S]], type[S]]:
    """Register a strategy under the name that `--method` takes; used as a class decorator.

    Keyword arguments of the constructor become options of the command, each with its help beside it:

        @register_strategy("pull")
        class Pull(FedAvg):
            def __init__(self, *, strength: Annotated[float, "how hard clients pull"] = 0.1, **options: Any) -> None:

    A name that another strategy has is a ValueError.
    """

    def register(strategy: type[S]) -> type[S]:
        add(REGISTRY, "strategy", name, strategy)
        return strategy

    return register
