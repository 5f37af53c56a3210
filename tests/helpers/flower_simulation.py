"""The grid of Flower's simulation, without Flower's processes."""

from collections.abc import Iterable
from typing import Any

from fedbn_flwr.simulation.in_process import InProcessGrid


class InMemoryGrid(InProcessGrid):
    """A grid with the name of Flower's, whose nodes connect one after another."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._looks = 0

    def get_node_ids(self) -> Iterable[int]:
        """Return one node more at every look."""
        self._looks += 1
        return list(super().get_node_ids())[: self._looks]
