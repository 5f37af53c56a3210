"""A grid that shows only sites whose data fit the run, also of those that come later."""

from collections.abc import Iterable
from logging import INFO, WARNING

from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.experiments.sites.agreement import Agreement, ask_sites, holder, spoken
from fedbn_flwr.server.passing_grid import PassingGrid

#: seconds that a site has to describe its data when it comes after round 1
PATIENCE = 120.0


class SitesGrid(PassingGrid):
    """Asks a node for its data when it is connected for the first time, and hides it if they do not fit."""

    def __init__(self, grid: Grid, agreement: Agreement, secure: bool = False) -> None:
        super().__init__(grid)
        self._secure = secure
        self._agreement = agreement
        self._accepted = dict(agreement.sites)
        self._refused: set[int] = set()

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes that can take part."""
        connected = list(self._grid.get_node_ids())
        # a refused site is asked again when it comes back
        self._refused &= set(connected)
        new = [node for node in connected if node not in self._accepted and node not in self._refused]
        if new:
            self._meet(new, connected)
        return [node for node in connected if node in self._accepted]

    def _meet(self, new: list[int], connected: list[int]) -> None:
        for node, answer in ask_sites(self._grid, new, PATIENCE, self._secure).items():
            reason = answer if isinstance(answer, str) else self._agreement.objection(answer)
            present = {known: site for known, site in self._accepted.items() if known in connected}
            if isinstance(answer, str) or reason:
                log(WARNING, "Node %d cannot take part: %s", node, reason)
                self._refused.add(node)
            elif other := holder(answer.site, present):
                log(WARNING, "Node %d cannot take part: node %d has its site number %d", node, other, answer.site)
                self._refused.add(node)
            else:
                log(INFO, "Site %d (node %d): %s", answer.site, node, spoken(answer))
                self._accepted[node] = answer
