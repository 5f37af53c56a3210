"""FedTAN over the side channel without Flower's services: a process a node, over TLS and relays that delay."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Handler, LogRecord
from pathlib import Path
from statistics import median
from typing import Any

from flwr.common.logger import FLOWER_LOGGER

from fedbn_flwr.deployment.cli import main as fedbn_flwr
from fedbn_flwr.experiments import resolve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.transports.side_channel_client import ADDRESS_VARIABLE, CERTIFICATES_VARIABLE
from fedbn_flwr.transports.side_channel_grid import SideChannelGrid, SideChannelOptions
from tests.helpers.checkout import ROOT
from tests.helpers.concurrent_nodes import ConcurrentNodes, Site
from tests.helpers.ports import free_ports
from tests.helpers.relay import Relay

#: what the server's log says of each round over the side channel
EXCHANGES = re.compile(r"\d+ exchanges over the side channel in ([\d.]+) s, the median of them in ([\d.]+) ms")
#: seconds that nobody needs
_ENOUGH = 600.0


def measure_streams(options: dict[str, Any], nodes: int, rtt: float) -> dict[str, Any]:
    """Run some rounds; return the medians of an exchange's milliseconds and of a round's seconds."""
    options = {**options, "clients": nodes, "device": "cpu"}
    with tempfile.TemporaryDirectory(prefix="fedbn-bench-") as name, _shown() as shown:
        folder = Path(name)
        assert fedbn_flwr(["provision", str(ROOT / "federation.example.yaml"), "--out", str(folder / "out")]) == 0
        server = folder / "out" / "server"
        (port,) = free_ports(1)
        relays = [Relay(0, ("127.0.0.1", port)) for _ in range(nodes)]
        sites = {}
        for number, relay in enumerate(relays):
            relay.delay = rtt / 2000
            way = {CERTIFICATES_VARIABLE: str(server / "ca.crt"), ADDRESS_VARIABLE: f"127.0.0.1:{relay.port}"}
            sites[number] = Site(way, make_client=bound_client_fn(resolve(options).config))
        certificates = (server / "server.key").read_bytes(), (server / "server.crt").read_bytes()
        channel = SideChannelOptions(port, f"localhost:{port}", certificates, _ENOUGH)
        grid = ConcurrentNodes(nodes, sites)
        try:
            run(SideChannelGrid(grid, channel), resolve(options), folder / "results")
        finally:
            grid.close()
            for relay in relays:
                relay.close()
        found = [float(match[2]) for text in shown for match in EXCHANGES.finditer(text)]
        seconds = median(row["seconds"] for row in read_rounds(folder / "results"))
        return {"ms-per-exchange": median(found), "seconds-per-round": round(seconds, 2), "rounds": len(found)}


@contextmanager
def _shown() -> Iterator[list[str]]:
    """Collect what is logged inside the block."""
    texts: list[str] = []

    class Collector(Handler):
        def emit(self, record: LogRecord) -> None:
            texts.append(record.getMessage())

    collector = Collector()
    FLOWER_LOGGER.addHandler(collector)
    try:
        yield texts
    finally:
        FLOWER_LOGGER.removeHandler(collector)
