"""Names of sites: here alone, a node's number becomes the name under which the operator has
registered its key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from logging import INFO, LogRecord

from flwr.common import log
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import Grid

from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.wire import printable

#: a node's number in a text, with the words around it
_NODE = re.compile(r"(site \d+ \()?(?:node )?\b(\d+)\b(?(1)\))", re.IGNORECASE)


class SitesByName(PassingGrid):
    """A grid that knows the names of its nodes, and hides the nodes of all sites but the chosen
    ones, if any are.
    """

    def __init__(self, grid: Grid, chosen: Sequence[str] = ()) -> None:
        super().__init__(grid)
        self._chosen = chosen
        self._idle = set[str]()

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes that take part."""
        # older versions of Flower do not tell names
        there: dict[int, str] = {
            node.node_id: printable(getattr(node, "name", ""))
            for node in getattr(self._grid, "get_nodes", tuple)()
        }
        there = there or dict.fromkeys(self._grid.get_node_ids(), "")
        if self._chosen and there and not any(there.values()):
            raise UsageError(
                f"sites={','.join(self._chosen)!r} chooses by name, and these nodes have no names"
            )
        if self._chosen:
            idle = {*there.values()} - {*self._chosen, *self._idle}
            if idle:
                self._idle |= idle
                log(INFO, "Idle, because `sites` does not name them: %s", ", ".join(sorted(idle)))
        there = {
            node: name for node, name in there.items() if not self._chosen or name in self._chosen
        }
        self.names.update({node: name for node, name in there.items() if name})
        return list(there)


def with_names(text: str, names: Mapping[int, str]) -> str:
    """Return a text with the name in front of every node's number."""

    def named(match: re.Match[str]) -> str:
        name = names.get(int(match[2]))
        if name:
            return f"{name} (node {match[2]})"
        return match[0]

    return _NODE.sub(named, text) if names else text


@contextmanager
def sites_by_name(grid: Grid, chosen: Sequence[str]) -> Iterator[SitesByName]:
    """Yield a grid that knows names, which also stand in the log and in errors."""
    sites = SitesByName(grid, chosen)

    def rename(record: LogRecord) -> bool:
        with suppress(TypeError, ValueError):  # of arguments that do not fit, logging speaks itself
            record.msg = with_names(record.getMessage(), sites.names)
            record.args = None
        return True

    FLOWER_LOGGER.addFilter(rename)
    try:
        yield sites
    except Exception as error:
        error.args = tuple(
            with_names(each, sites.names) if isinstance(each, str) else each for each in error.args
        )
        raise
    finally:
        FLOWER_LOGGER.removeFilter(rename)
