"""The choice of nodes: what they say of themselves, and a draw that does not depend on Flower's
random node ids.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.randomness import numpy_generator
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.server.replies import (
    Refusal,
    RefusedError,
    log_refused,
    read_count,
    read_each,
    read_metrics,
    whole,
)
from fedbn_flwr.state import Arrays

#: nodes that are asked at a time: their questions and answers are in memory together
ASKED_AT_ONCE = 500


@dataclass(frozen=True)
class Node:
    """A node's description of itself."""

    node: int
    partition: int
    #: -1 if it does not know yet
    num_examples: int = -1
    domain: int = -1
    #: the state-dict entries that are parameters, and those of BN layers
    parameters: tuple[str, ...] = ()
    bn_entries: tuple[str, ...] = ()
    #: further names of entries, each with the first name of the entry
    tied: tuple[tuple[str, str], ...] = ()


class Roster:
    """The nodes' descriptions; every node is asked once.

    Which nodes are drawn depends on all descriptions, so nodes have `timeout` seconds. A node that
    says nothing, or what cannot be read, is known by its id only, and named in the log.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[int, Node] = {}

    def describe(self, grid: Grid, nodes: list[int]) -> Mapping[int, Node]:
        """Return each node's description, and ask the nodes that were not asked yet, so many at a
        time.
        """
        new = [node for node in nodes if node not in self._known]
        for start in range(0, len(new), ASKED_AT_ONCE):
            self._ask(grid, new[start : start + ASKED_AT_ONCE])
        return {node: self._known[node] for node in nodes}

    def parameters(
        self, grid: Grid, model: Arrays, who: str
    ) -> tuple[frozenset[str], Mapping[str, str]]:
        """Return which entries of a model are parameters, and further names of entries with their
        first ones.

        This is what most nodes say. One that names no parameters, or entries that the model does
        not have, has no vote.
        """
        nodes = self.describe(grid, sorted(grid.get_node_ids())).values()
        votes = Counter((node.parameters, node.tied) for node in nodes if node.parameters)
        form = {name: (value.shape, value.dtype) for name, value in model.items()}
        known = [said for said in votes if form.keys() >= {*said[0], *chain(*said[1])}]
        fitting = [
            said for said in known if all(form[name] == form[first] for name, first in said[1])
        ]
        if not fitting:
            raise ValueError(
                f"{who} needs clients that say which entries are parameters (`describe`)"
            )
        names, tied = max(fitting, key=lambda said: (votes[said], len(said[0])))
        return frozenset(names), dict(tied)

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        content = RecordDict({wire.CONFIG: ConfigRecord()})
        questions = [
            Message(content, dst_node_id=node, message_type=wire.DESCRIBE) for node in nodes
        ]
        answers = ask_nodes(grid, questions, self._timeout)
        described, refused = read_each(answers.items(), _read)
        refused += [
            Refusal(node, f"no answer in {self._timeout:g} seconds")
            for node in nodes
            if node not in answers
        ]
        log_refused(refused, "drawn by id, without a description")
        self._known |= described | {
            refusal.node: Node(refusal.node, refusal.node) for refusal in refused
        }


def draw_described(
    nodes: Mapping[int, Node], count: int, seed: int, server_round: int
) -> list[int]:
    """Draw nodes without replacement, the same partitions for the same seed and round.

    They are sorted by partition.
    """
    ordered = sorted(nodes.values(), key=lambda node: (node.partition, node.node))
    generator = numpy_generator(seed, "sampling", server_round)
    chosen = sorted(generator.choice(len(ordered), size=min(count, len(ordered)), replace=False))
    return [ordered[index].node for index in chosen]


def _read(node: int, answer: Message) -> Node:
    if answer.has_error():
        raise RefusedError(answer.error.reason or "it failed")
    metrics = read_metrics(answer.content)
    report = answer.content.config_records[wire.REPORT]
    partition, domain = (whole(metrics, key) for key in (wire.PARTITION_ID, wire.DOMAIN))
    count = metrics[wire.NUM_EXAMPLES]
    if count != -1:
        read_count(count)
    names, bn, tied = (
        _strings(key, report.get(key, [])) for key in (wire.PARAMETERS, wire.BN_ENTRIES, wire.TIED)
    )
    if len(tied) % 2:
        raise RefusedError(f"its {wire.TIED!r} are {len(tied)} names, no pairs")
    return Node(
        node,
        partition,
        int(count),
        domain,
        names,
        bn,
        tuple(zip(tied[::2], tied[1::2], strict=True)),
    )


def _strings(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RefusedError(f"its {key!r} are {value!r}, no names")
    return _once(tuple(value))


@lru_cache(maxsize=64)
def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names as the same object: thousands of nodes name the same entries."""
    return names
