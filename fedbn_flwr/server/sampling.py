"""The choice of nodes: a finite wait, and a draw that does not depend on Flower's random node ids."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import INFO

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.randomness import numpy_generator
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.server.replies import (
    CannotTrainError,
    Expected,
    RefusedError,
    log_refused,
    read_each,
    read_metrics,
    whole,
)

#: nodes that are asked at a time: their questions and answers are in memory together
ASKED_AT_ONCE = 500
#: seconds between log entries while nodes are waited for
SAY_EVERY = 60.0
#: nodes that an error names at most
NAMED = 10
#: codes of errors that a node's app answers with; others say that a node, or a message, got lost
ANSWERED = (
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.MOD_FAILED_PRECONDITION,
)


@dataclass(frozen=True)
class Node:
    """A node's description of itself."""

    node: int
    partition: int
    num_examples: int = 0
    domain: int = -1
    #: the state-dict entries that are parameters, and those of BN layers
    parameters: tuple[str, ...] = ()
    bn_entries: tuple[str, ...] = ()
    #: further names of entries, each followed by the first name of the entry
    tied: tuple[str, ...] = ()


def wait_for_nodes(grid: Grid, wanted: int, patience: float, fewest: int | None = None) -> list[int]:
    """Return the connected nodes as soon as there are `wanted`, or after `patience` seconds if there are `fewest`.

    Raises `CannotTrainError` if there are too few.
    """
    began = said = time.monotonic()
    while len(nodes := sorted(grid.get_node_ids())) < wanted:
        now = time.monotonic()
        if now > began + patience:
            if len(nodes) >= (wanted if fewest is None else fewest):
                break
            raise CannotTrainError(f"{len(nodes)} of {wanted} nodes connected within {patience:g} seconds")
        if now > said + SAY_EVERY:
            log(INFO, "Waiting for nodes: %d of %d are connected", len(nodes), wanted)
            said = now
        time.sleep(0.5)
    return nodes


class Roster:
    """The nodes' descriptions; every node is asked once.

    Which nodes are drawn depends on all descriptions. So nodes have `timeout` seconds, and a node that stays silent
    ends the run: to draw without it would let the machine's speed decide who takes part.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[int, Node] = {}
        self._silent: set[int] = set()

    def describe(self, grid: Grid, nodes: list[int]) -> Mapping[int, Node]:
        """Return each node's description, and ask the nodes that were not asked yet.

        A node whose app cannot answer is known by its id only. Raises `CannotTrainError` if nodes do not answer.
        """
        for some in self._new_among(nodes):
            if missing := [f"{node} ({reason})" for node, reason in self._ask(grid, some).items()]:
                more = f", and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
                raise CannotTrainError(
                    f"{len(missing)} of {len(some)} nodes did not say who they are within {self._timeout:g} seconds, "
                    f"and which nodes are drawn depends on it: {', '.join(missing[:NAMED])}{more}"
                )
        return {node: self._known[node] for node in nodes}

    def describe_answering(self, grid: Grid, nodes: list[int]) -> Mapping[int, Node]:
        """Return the descriptions of nodes that answer, now or before; silent ones are left out, and asked once."""
        for some in self._new_among([node for node in nodes if node not in self._silent]):
            self._silent |= self._ask(grid, some).keys()
        return {node: self._known[node] for node in nodes if node in self._known}

    def _new_among(self, nodes: list[int]) -> Iterator[list[int]]:
        """Yield the nodes that were not asked yet, so many at a time."""
        new = [node for node in nodes if node not in self._known]
        for start in range(0, len(new), ASKED_AT_ONCE):
            yield new[start : start + ASKED_AT_ONCE]

    def _ask(self, grid: Grid, nodes: list[int]) -> dict[int, str | None]:
        """Ask nodes who they are, and return why some did not say it."""
        content = RecordDict({wire.CONFIG: ConfigRecord()})
        questions = [Message(content, dst_node_id=node, message_type=wire.DESCRIBE) for node in nodes]
        answers = ask_nodes(grid, questions, self._timeout)
        missing: dict[int, str | None] = {node: "no answer" for node in nodes if node not in answers}
        for node, answer in answers.items():
            if answer.has_error() and answer.error.code not in ANSWERED:
                missing[node] = answer.error.reason
        heard = [(node, answer) for node, answer in answers.items() if node not in missing]
        described, refused = read_each(heard, _read)
        log_refused(refused, "drawn by id, without a description")
        self._known |= described | {refusal.node: Node(refusal.node, refusal.node) for refusal in refused}
        return missing


def draw(nodes: Mapping[int, Node], count: int, seed: int, server_round: int) -> list[int]:
    """Draw nodes without replacement, the same partitions for the same seed and round; sorted by partition."""
    ordered = sorted(nodes.values(), key=lambda node: (node.partition, node.node))
    generator = numpy_generator(seed, "sampling", server_round)
    chosen = sorted(generator.choice(len(ordered), size=min(count, len(ordered)), replace=False))
    return [ordered[index].node for index in chosen]


def _read(node: int, answer: Message) -> Node:
    if answer.has_error():
        raise RefusedError(answer.error.reason or "it failed")
    metrics, report = read_metrics(answer.content), answer.content.config_records[wire.REPORT]
    partition, domain = (whole(metrics, key) for key in (wire.PARTITION_ID, wire.DOMAIN))
    num_examples = Expected((), {}).count_of(node, metrics[wire.NUM_EXAMPLES])
    names = (_strings(key, report.get(key, [])) for key in (wire.PARAMETERS, wire.BN_ENTRIES, wire.TIED))
    return Node(node, partition, int(num_examples), domain, *names)


def _strings(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RefusedError(f"its {key!r} are {value!r}, no names")
    return _once(tuple(value))


@lru_cache(maxsize=64)
def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names as the same object: thousands of nodes name the same entries."""
    return names
