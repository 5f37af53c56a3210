"""The benchmark of deployments: the columns of its file, and what an exchange's time is made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import deploy
from tests.helpers.loopback import has_proxy

COLUMNS = ["transport", "model", "nodes", "rtt-ms", "ms-per-exchange", "seconds-per-round"]
#: what a ServerApp's log says of a round over the side channel
SAID = "INFO :      38 exchanges over the side channel in 0.25 s, the median of them in {} ms\n"


class FakeRelay:
    delay = 0.0


class FakeFederation:
    """A federation whose runs have ended as soon as they are submitted."""

    def __init__(self, folder: Path, sites: tuple[str, ...]) -> None:
        self.folder, self.sites = folder, sites
        self.relays, self.exchange_relays = {site: FakeRelay() for site in sites}, {site: FakeRelay() for site in sites}
        self.submitted: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def register(self) -> None: ...

    def submit(self, options: dict[str, Any]) -> str:
        self.submitted.append(options)
        exchanges = 40 if options["method"] == "fedtan" else 1
        rows = [{"seconds": seconds, "exchanges": exchanges} for seconds in (60.0, 100.0, 80.0)]
        (self.folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(len(self.submitted))

    def await_end(self, number: str) -> str:
        return "finished:completed"

    def results(self, number: str) -> Path:
        return self.folder

    def log(self, number: str) -> str:
        options = self.submitted[int(number) - 1]
        over_channel = options["method"] == "fedtan" and "exchange-port" not in options
        return "".join(map(SAID.format, ("7.00", "5.00", "6.50"))) if over_channel else "INFO : no exchanges\n"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return what the command writes in a fake deployment."""
    monkeypatch.setattr(deploy, "LoopbackFederation", FakeFederation)
    monkeypatch.setattr(deploy, "has_proxy", lambda: True)

    def run(*words: str) -> list[dict[str, Any]]:
        assert deploy.main([*words, "--results-dir", str(tmp_path)]) == 0
        rows: list[dict[str, Any]] = json.loads((tmp_path / "bench-deploy.json").read_text())
        return rows

    return run


def test_the_columns_and_what_an_exchange_takes(measured: Callable[..., list[dict[str, Any]]]) -> None:
    """By channel: what the log says. By messages: 80 s a round over its 40 exchanges. FedAvg has no exchanges."""
    rows = measured("--transports", "channel,messages,fedavg", "--nodes", "2,8", "--rtt", "0,20", "--rounds", "3")
    assert [list(row) for row in rows] == [[*COLUMNS, "rounds"]] * 12
    assert [(row["nodes"], row["rtt-ms"], row["transport"]) for row in rows] == [
        (nodes, rtt, transport)
        for nodes in (2, 8)
        for rtt in (0, 20)
        for transport in ("channel", "messages", "fedavg")
    ]
    assert {row["model"] for row in rows} == {"resnet20"}
    assert {row["transport"]: row["ms-per-exchange"] for row in rows} == {
        "channel": 6.5,
        "messages": 2000.0,
        "fedavg": None,
    }
    assert {row["seconds-per-round"] for row in rows} == {80.0}


@pytest.mark.slow
@pytest.mark.skipif(not has_proxy(), reason="nginx is not installed")
def test_streams_have_the_same_columns(tmp_path: Path) -> None:
    words = ("--transports", "streams", "--nodes", "2", "--rtt", "1", "--models", "small-cnn", "--rounds", "1")
    assert deploy.main([*words, "--results-dir", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "bench-deploy.json").read_text())
    assert list(row) == [*COLUMNS, "rounds"]
    assert [row[name] for name in COLUMNS[:4]] == ["streams", "small-cnn", 2, 1]
    assert min(row["ms-per-exchange"], row["seconds-per-round"]) > 0
