"""The quantities of a recipe's table, each read from the summary of a run."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

#: column -> value; the rounds are those of the recipe at full size
Read = Callable[[Mapping[str, Any], int], dict[str, float]]
AVERAGE = "Average"


def columns_of(summary: Mapping[str, Any], quantity: str, rounds: int) -> dict[str, float]:
    """Return the columns that a run fills in; none if it could not train or did not record the quantity."""
    try:
        return QUANTITIES[quantity](summary, rounds)
    except (KeyError, TypeError):  # a number that is not finite is null
        return {}


def _percent(key: str) -> Read:
    return lambda summary, _: {key: 100 * summary[key]}


def _plain(key: str) -> Read:
    return lambda summary, _: {key: summary[key] * 1.0}


def _domains(summary: Mapping[str, Any], _: int) -> dict[str, float]:
    values = {name: 100 * value for name, value in summary["domain-accuracy"].items()}
    return {**values, AVERAGE: fmean(values.values())}


def _megabytes(summary: Mapping[str, Any], _: int) -> dict[str, float]:
    return {"megabytes": summary["paper-bytes"] / summary["rounds"] / 2**20}


def _gigabytes(summary: Mapping[str, Any], rounds: int) -> dict[str, float]:
    return {"gigabytes": summary["paper-bytes"] / summary["rounds"] * rounds / 2**30}


def _extra_exchanges(summary: Mapping[str, Any], _: int) -> dict[str, float]:
    return {"extra-exchanges": 100 * (1 - summary["rounds"] / summary["exchanges"])}


#: columns that are counted and not measured, with their units: every printed digit says something
COUNTED = {"megabytes": "MiB a round", "gigabytes": "GiB in total", "extra-exchanges": "share of extra exchanges, %"}

#: accuracies and shares in percent
QUANTITIES: dict[str, Read] = {
    "accuracy": _percent("accuracy"),
    "mean-iou": _percent("mean-iou"),
    "accuracy-personal": _percent("accuracy-personal"),
    "accuracy-mean-bn": _percent("accuracy-mean-bn"),
    # of every domain, and the mean over domains
    "domain-accuracy": _domains,
    "loss": _plain("loss"),
    "train-loss": _plain("train-loss"),
    "train-loss-global": _plain("train-loss-global"),
    # as FedTAN's paper counts, in powers of 2^10: a round, and in as many rounds as the recipe has at full size
    "megabytes": _megabytes,
    "gigabytes": _gigabytes,
    # the share of the exchanges beyond one a round
    "extra-exchanges": _extra_exchanges,
}


def heading_of(column: str) -> str:
    """Return a column's name with its unit."""
    return COUNTED.get(column) or column.replace("-", " ").replace("bn", "BN") + ("" if "loss" in column else ", %")
