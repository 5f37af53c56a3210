"""The state of a federation in a few lines: its sites and its runs."""

from collections.abc import Iterator
from typing import Any

from fedbn_flwr.deployment.operator import Operator

#: how many runs are shown
RUNS = 10


def describe(operator: Operator) -> Iterator[str]:
    """Yield the lines: a site each, then a run each, the newest first."""
    nodes = {str(node["node-id"]): node for node in operator.nodes()}
    yield f"{'site':<20} {'node':<20} {'state':<14} since"
    for site, number in sorted(operator.sites().items()):
        yield _site(site, number, nodes.get(number, {"status": "unknown to the server"}))
    yield ""
    yield f"{'run':<20} {'state':<24} {'method':<16} {'rounds':<9} last round"
    for run in operator.runs()[:RUNS]:
        yield _run(run, operator.progress(str(run["run-id"])))


def _site(name: str, number: str, node: dict[str, Any]) -> str:
    since = node.get({"online": "online-at", "offline": "offline-at"}.get(node["status"], "created-at"), "")
    return f"{name:<20} {number:<20} {node['status']:<14} {since}"


def _run(run: dict[str, Any], progress: dict[str, Any]) -> str:
    state = f"{run['run-id']!s:<20} {run['status']!s:<24}"
    if not progress:
        return state.rstrip()
    last = progress["last"]
    numbers = {key: last[key] for key in ("nodes", "train-loss", "accuracy") if last.get(key) is not None}
    shown = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
    return f"{state} {progress['method']:<16} {progress['done']}/{progress['rounds']:<7} {shown}".rstrip()
