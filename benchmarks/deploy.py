"""Rounds of a deployment on the loopback: FedTAN by side channel and by messages, and FedAvg: `make
bench-deploy`.

Server and sites are the processes of docker-compose.yml, over TLS, with the proxy in between, and
each site reaches its server by a relay that holds data back for half a round trip, each way. A
process of a site starts for every message. `--transports streams` does without Flower's services,
and is over in a minute.
"""

import argparse
import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import Handler, LogRecord
from pathlib import Path
from statistics import median
from typing import Any

from flwr.common.logger import FLOWER_LOGGER

from benchmarks.results import Row, write
from fedbn_flwr.deployment.cli import main as fedbn_flwr
from fedbn_flwr.experiments import resolve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.output.run_folder import make_folder, read_rounds
from fedbn_flwr.experiments.server_side import run_on_grid
from fedbn_flwr.transports.side_channel_client import CERTIFICATES_VARIABLE, SITE_ADDRESS_VARIABLE
from fedbn_flwr.transports.side_channel_grid import SideChannelGrid, SideChannelOptions
from tests.helpers.checkout import ROOT
from tests.helpers.concurrent_nodes import ConcurrentNodes, Site
from tests.helpers.loopback import LoopbackFederation, has_proxy
from tests.helpers.ports import free_ports
from tests.helpers.relay import Relay

#: FedTAN over the side channel, by messages, and a round without exchanges, for comparison
TRANSPORTS: dict[str, dict[str, Any]] = {
    "channel": {"method": "fedtan"},
    "messages": {"method": "fedtan", "exchange-port": 0},
    "fedavg": {"method": "fedavg"},
}
#: as in the measurements of a single machine
_OPTIONS: dict[str, Any] = {
    "partition": "iid",
    "local-steps": 5,
    "batch-size": 32,
    "evaluate-every": 1000,
}

#: FedTAN over the side channel, with a process a node in place of Flower's services
STREAMS = "streams"

#: what the server's log says of each round over the side channel
EXCHANGES = re.compile(
    r"\d+ exchanges over the side channel in ([\d.]+) s, the median of them in ([\d.]+) ms"
)
#: seconds that nobody needs
_ENOUGH = 600.0


def measure(federation: LoopbackFederation, options: Row, rounds: int) -> Row:
    """Run some rounds; return the medians of a round's seconds, and of an exchange's milliseconds
    if it has several.
    """
    number = federation.submit(
        {**_OPTIONS, **options, "rounds": rounds, "clients": len(federation.sites)}
    )
    status = federation.await_end(number)
    if status != "finished:completed":
        return {"error": status}
    done = read_rounds(federation.results(number))
    seconds = median(row["seconds"] for row in done)
    # by messages, a round's, training included
    times = [float(match[2]) for match in EXCHANGES.finditer(federation.log(number))] or [
        round(1000 * row["seconds"] / row["exchanges"], 1)
        for row in done
        if options["method"] != "fedavg"
    ]
    return {
        "ms-per-exchange": median(times) if times else None,
        "seconds-per-round": round(seconds, 2),
        "rounds": rounds,
    }


def measure_streams(options: Row, nodes: int, rtt: float) -> Row:
    """Run some rounds; return the medians of an exchange's milliseconds and of a round's
    seconds.
    """
    options = {**options, "clients": nodes, "device": "cpu"}
    with tempfile.TemporaryDirectory(prefix="fedbn-bench-") as name, _shown() as shown:
        folder = Path(name)
        assert (
            fedbn_flwr(
                ["provision", str(ROOT / "federation.example.yaml"), "--out", str(folder / "out")]
            )
            == 0
        )
        server = folder / "out" / "server"
        (port,) = free_ports(1)
        relays = [Relay(0, ("127.0.0.1", port)) for _ in range(nodes)]
        sites = {}
        for number, relay in enumerate(relays):
            relay.delay = rtt / 2000
            way = {
                CERTIFICATES_VARIABLE: str(server / "ca.crt"),
                SITE_ADDRESS_VARIABLE: f"127.0.0.1:{relay.port}",
            }
            sites[number] = Site(way, make_client=bound_client_fn(resolve(options).config))
        certificates = (server / "server.key").read_bytes(), (server / "server.crt").read_bytes()
        channel = SideChannelOptions(port, f"localhost:{port}", certificates, _ENOUGH)
        grid = ConcurrentNodes(nodes, sites)
        try:
            run_on_grid(SideChannelGrid(grid, channel), resolve(options), folder / "results")
        finally:
            grid.close()
            for relay in relays:
                relay.close()
        found = [float(match[2]) for text in shown for match in EXCHANGES.finditer(text)]
        seconds = median(row["seconds"] for row in read_rounds(folder / "results"))
        return {
            "ms-per-exchange": median(found),
            "seconds-per-round": round(seconds, 2),
            "rounds": len(found),
        }


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


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every combination; a federation is made once for each number of nodes."""
    streams = options.nodes if STREAMS in options.transports else ()
    for nodes, rtt, model in itertools.product(streams, options.rtt, options.models):
        asked = {**_OPTIONS, "method": "fedtan", "model": model, "rounds": options.rounds}
        case = {"transport": STREAMS, "model": model, "nodes": nodes, "rtt-ms": rtt}
        yield {**case, **measure_streams(asked, nodes, rtt)}
    deployed = [transport for transport in options.transports if transport in TRANSPORTS]
    for nodes in options.nodes if deployed else ():
        with tempfile.TemporaryDirectory(prefix="fedbn-bench-") as folder:
            sites = tuple(f"site-{number}" for number in range(nodes))
            with LoopbackFederation(Path(folder), sites) as federation:
                federation.register()
                for rtt in options.rtt:
                    for relay in (
                        *federation.relays.values(),
                        *federation.exchange_relays.values(),
                    ):
                        relay.delay = rtt / 2000
                    for model in options.models:
                        for transport in deployed:
                            case = {
                                "transport": transport,
                                "model": model,
                                "nodes": nodes,
                                "rtt-ms": rtt,
                            }
                            asked = {**TRANSPORTS[transport], "model": model}
                            yield {**case, **measure(federation, asked, options.rounds)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print each row when it is there, and write all rows to `bench-deploy.json`."""
    options = _parser().parse_args(arguments)
    if not (has_proxy() or set(options.transports) == {STREAMS}):
        print("nginx is not installed: it is the proxy in front of the side channel")
        return 2
    rows: list[Row] = []
    folder = make_folder(Path(options.results_dir))
    for row in rows_of(options):
        print(row, flush=True)
        rows.append(row)
        write(folder / "bench-deploy.json", rows)
    return 1 if any("error" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy", description=__doc__)
    parser.add_argument(
        "--nodes", type=_numbers, default=[2, 3, 8], help="numbers of sites [2,3,8]"
    )
    parser.add_argument(
        "--rtt", type=_numbers, default=[0, 1, 20, 100], help="round trips in ms [0,1,20,100]"
    )
    parser.add_argument("--models", type=_names, default=["resnet20"], help="models [resnet20]")
    parser.add_argument("--transports", type=_names, default=[STREAMS, *TRANSPORTS], help="[all]")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each run [2]")
    parser.add_argument(
        "--results-dir", default="results", help="folder for bench-deploy.json [results]"
    )
    return parser


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    raise SystemExit(main())
