"""Rounds of a deployment on the loopback: FedTAN by side channel and by messages, and FedAvg: `make bench-deploy`.

Server and sites are the processes of docker-compose.yml, over TLS, with the proxy in between, and each site reaches its
server by a relay that holds data back for half a round trip, each way. A process of a site starts for every message.
`--transports streams` does without Flower's services, and is over in a minute.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.streams import EXCHANGES, measure_streams
from fedbn_flwr.experiments.output.run_folder import make_folder, read_rounds
from tests.helpers.loopback import LoopbackFederation, has_proxy

#: FedTAN over the side channel, by messages, and a round without exchanges, for comparison; and under masks
TRANSPORTS: dict[str, dict[str, Any]] = {
    "channel": {"method": "fedtan"},
    "messages": {"method": "fedtan", "exchange-port": 0},
    "fedavg": {"method": "fedavg"},
    "secure-channel": {"method": "fedtan", "secure": True},
    "secure-fedavg": {"method": "fedavg", "secure": True},
}
#: as in the measurements of a single machine
_OPTIONS: dict[str, Any] = {"partition": "iid", "local-steps": 5, "batch-size": 32, "evaluate-every": 1000}

#: FedTAN over the side channel, with a process a node in place of Flower's services
STREAMS: dict[str, dict[str, Any]] = {"streams": {}, "secure-streams": {"secure": True}}

Row = dict[str, Any]


def measure(federation: LoopbackFederation, options: Row, rounds: int) -> Row:
    """Run some rounds; return the medians of a round's seconds, and of an exchange's milliseconds if it has several."""
    number = federation.submit({**_OPTIONS, **options, "rounds": rounds, "clients": len(federation.sites)})
    status = federation.await_end(number)
    if status != "finished:completed":
        return {"error": status}
    done = read_rounds(federation.results(number))
    seconds = statistics.median(row["seconds"] for row in done)
    by_channel = [float(match[2]) for match in EXCHANGES.finditer(federation.log(number))]
    return {
        "ms-per-exchange": statistics.median(by_channel) if by_channel else _by_messages(options["method"], done),
        "seconds-per-round": round(seconds, 2),
        "rounds": rounds,
    }


def _by_messages(method: str, rounds: Sequence[Row]) -> float | None:
    """Return the milliseconds of a round, training included, over its exchanges; None for a method without."""
    if method == "fedavg":
        return None
    return round(float(statistics.median(1000 * row["seconds"] / row["exchanges"] for row in rounds)), 1)


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every combination; a federation is made once for each number of nodes."""
    streams = [transport for transport in options.transports if transport in STREAMS]
    for nodes, rtt, model, transport in itertools.product(options.nodes, options.rtt, options.models, streams):
        asked = {**_OPTIONS, "method": "fedtan", "model": model, "rounds": options.rounds, **STREAMS[transport]}
        case = {"transport": transport, "model": model, "nodes": nodes, "rtt-ms": rtt}
        yield {**case, **measure_streams(asked, nodes, rtt)}
    deployed = [transport for transport in options.transports if transport in TRANSPORTS]
    for nodes in options.nodes if deployed else ():
        with tempfile.TemporaryDirectory(prefix="fedbn-bench-") as folder:
            sites = tuple(f"site-{number}" for number in range(nodes))
            with LoopbackFederation(Path(folder), sites) as federation:
                federation.register()
                for rtt in options.rtt:
                    for relay in (*federation.relays.values(), *federation.exchange_relays.values()):
                        relay.delay = rtt / 2000
                    for model in options.models:
                        for transport in deployed:
                            case = {"transport": transport, "model": model, "nodes": nodes, "rtt-ms": rtt}
                            asked = {**TRANSPORTS[transport], "model": model}
                            yield {**case, **measure(federation, asked, options.rounds)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print each row when it is there, and write all rows to `bench-deploy.json`."""
    options = _parser().parse_args(arguments)
    if not has_proxy():
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
        "--nodes", type=_numbers, default=[2, 3, 8], help="numbers of sites, under masks at least 3 [2,3,8]"
    )
    parser.add_argument("--rtt", type=_numbers, default=[0, 1, 20, 100], help="round trips in ms [0,1,20,100]")
    parser.add_argument("--models", type=_names, default=["resnet20"], help="models [resnet20]")
    parser.add_argument("--transports", type=_names, default=[*STREAMS, *TRANSPORTS], help="[all]")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each run [2]")
    parser.add_argument("--results-dir", default="results", help="folder for bench-deploy.json [results]")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    raise SystemExit(main())
