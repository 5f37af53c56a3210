"""Which nodes take part: a finite wait, and a draw that does not depend on Flower's random node ids."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.randomness import numpy_generator
from fedbn_flwr.server.ask_nodes import ask_nodes

#: nodes that are asked at a time: their questions and answers are in memory together
ASKED_AT_ONCE = 500


@dataclass(frozen=True)
class Node:
    """What a node says of itself."""

    node: int
    partition: int
    num_examples: int = 0
    domain: int = -1
    #: the state-dict entries that are parameters, and those of BN layers
    parameters: tuple[str, ...] = ()
    bn_entries: tuple[str, ...] = ()


def wait_for_nodes(grid: Grid, wanted: int, patience: float) -> list[int]:
    """The connected nodes, as soon as there are enough; a clear error if there are too few in the end."""
    deadline = time.monotonic() + patience
    while len(nodes := sorted(grid.get_node_ids())) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(nodes)} of {wanted} nodes connected within {patience:g} seconds")
        time.sleep(0.5)
    return nodes


class Roster:
    """The nodes' descriptions, asked for once a node."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._known: dict[int, Node] = {}

    def describe(self, grid: Grid, nodes: list[int]) -> Mapping[int, Node]:
        """Ask the nodes that have not been asked; one that does not know the question is known by its id only."""
        new = [node for node in nodes if node not in self._known]
        for start in range(0, len(new), ASKED_AT_ONCE):
            self._ask(grid, new[start : start + ASKED_AT_ONCE])
        # one that did not answer is asked again next time
        return {node: self._known.get(node) or Node(node, node) for node in nodes}

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        content = RecordDict({wire.CONFIG: ConfigRecord()})
        questions = [Message(content, dst_node_id=node, message_type=wire.DESCRIBE) for node in nodes]
        answers = ask_nodes(grid, questions, self._patience)
        if silent := len(nodes) - len(answers):
            log(
                WARNING,
                "%d nodes did not say who they are in %g s: the seed alone does not decide who is drawn",
                silent,
                self._patience,
            )
        for node, answer in answers.items():
            if not answer.has_error():
                self._known[node] = _read(node, answer)


def draw(nodes: Mapping[int, Node], count: int, seed: int, server_round: int) -> list[int]:
    """Draw nodes without replacement, the same partitions for the same seed and round; sorted by partition."""
    ordered = sorted(nodes.values(), key=lambda node: (node.partition, node.node))
    generator = numpy_generator(seed, "sampling", server_round)
    chosen = sorted(generator.choice(len(ordered), size=min(count, len(ordered)), replace=False))
    return [ordered[index].node for index in chosen]


def _read(node: int, answer: Message) -> Node:
    metrics, report = answer.content.metric_records[wire.METRICS], answer.content.config_records[wire.REPORT]
    numbers = [metrics[key] for key in (wire.PARTITION_ID, wire.NUM_EXAMPLES, wire.DOMAIN)]
    partition, num_examples, domain = (int(value) for value in numbers if isinstance(value, int | float))
    parameters, bn_entries = (_strings(report.get(key)) for key in (wire.PARAMETERS, wire.BN_ENTRIES))
    return Node(node, partition, num_examples, domain, parameters, bn_entries)


def _strings(value: object) -> tuple[str, ...]:
    return _once(tuple(str(item) for item in value)) if isinstance(value, list) else ()


@lru_cache(maxsize=64)
def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names as the same object: thousands of nodes name the same entries."""
    return names
