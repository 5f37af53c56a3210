"""The client halves of methods under Flower's older server, which knows NumPyClients and `on_fit_config_fn`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.wire import Instruction, Scalar

from .fedavg import FedAvg
from .fixbn import FixBN
from .registry import REGISTRY

#: methods whose server only averages
AVERAGING = ("fedavg", "fedbn", "fedprox", "fedwon", "fixbn", "mtfl", "silobn")


def fit_config(strategy: BaseStrategy, **options: Any) -> Callable[[int], dict[str, Any]]:
    """Return an `on_fit_config_fn` for Flower's FedAvg with which a `BNClient` trains as this strategy's clients do.

    `options` are fields of the instruction and a user's own keys: `fit_config(FixBN(freeze_round=3), lr=0.05)`. The
    strategy's server must do nothing but average.
    """
    known = [REGISTRY[name] for name in AVERAGING]
    if type(strategy) not in known:
        names = ", ".join(kind.__name__ for kind in known)
        raise ValueError(f"the server of {type(strategy).__name__} does more than average; known: {names}")
    if more := _server_side(strategy):
        raise ValueError(f"the server of Flower's FedAvg only averages, which leaves out {more}")
    config = Instruction.from_config(_as_keys(options))
    strategy.round = replace(strategy.round, has_rate="lr" in options)

    def config_of(server_round: int) -> dict[str, Any]:
        # this server takes lists of arrays, in which nothing may be missing but what stays with clients
        asked = replace(strategy.instruct(replace(config, server_round=server_round)), omit="none")
        return {**_as_keys(options), **asked.to_config(always=_as_keys(options))}

    return config_of


def _server_side(strategy: BaseStrategy) -> str:
    """Return the option for which a server would have to do more than average."""
    asked = {
        "freeze_round='auto'": isinstance(strategy, FixBN) and strategy.freeze_at is None,
        "server_optimizer": strategy.server_optimizer is not None,
        "momentum_state='global'": strategy.instruct(Instruction()).momentum_state == "global",
        "privacy": isinstance(strategy, FedAvg) and strategy.privacy is not None,
        "robust": isinstance(strategy, FedAvg) and strategy.robust is not None,
    }
    return next((name for name, is_asked in asked.items() if is_asked), "")


def _as_keys(options: Mapping[str, Any]) -> dict[str, Scalar]:
    return {name.replace("_", "-"): value for name, value in options.items()}
