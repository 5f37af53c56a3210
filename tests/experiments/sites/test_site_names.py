"""Sites by the names under which they are registered: in the log, in results and in errors, and
chosen by name.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.logger import FLOWER_LOGGER
from flwr.proto.node_pb2 import NodeInfo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apps.client import app
from fedbn_flwr.experiments import UsageError, serve
from fedbn_flwr.experiments.output.run_folder import read_json, read_rounds
from fedbn_flwr.experiments.sites.own_model import MODELS_VARIABLE
from fedbn_flwr.server.site_names import SitesByName, sites_by_name, with_names
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import CannotTrainError
from tests.helpers.runs import model_bytes
from tests.helpers.site_folders import CLASSES, SitesInProcess, write_sites

NAMES = ("north", "south", "west")
PARTITION, SEED = "dirichlet:0.5", 3
OPTIONS: dict[str, Any] = {
    "dataset": "sites",
    "classes": ",".join(CLASSES),
    "node-timeout": 0,
    "model": "mlp",
    "rounds": 1,
    "local-steps": 1,
    "batch-size": 4,
    "evaluate-every": 1,
    "device": "cpu",
    "seed": SEED,
}


class Registered(SitesInProcess):
    """Nodes that the server knows by name; in a round, counted from 1, some may be away, fail, or
    answer too late.
    """

    def __init__(self, data: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(data, options)
        self.site_names = dict(enumerate(NAMES, 1000))
        self.away: dict[int, set[str]] = {}
        self.failing: dict[int, set[str]] = {}
        self.late: dict[int, set[str]] = {}
        self._round = 1

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> Iterable[NodeInfo]:
        there = self.site_names.items()
        return [
            NodeInfo(node_id=node, name=name)
            for node, name in there
            if not self._is(name, self.away)
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        in_time = [
            each
            for each in replies
            if not self._is(self.site_names[each.metadata.src_node_id], self.late)
        ]
        self._round += messages[0].metadata.message_type == MessageType.EVALUATE
        return in_time

    def _answer(self, message: Message) -> Message:
        trains = message.metadata.message_type == MessageType.TRAIN
        if trains and self._is(self.site_names[message.metadata.dst_node_id], self.failing):
            return Message(Error(0, "no power"), reply_to=message)
        return super()._answer(message)

    def _is(self, name: str, rounds: Mapping[int, set[str]]) -> bool:
        return name in rounds.get(self._round, ())


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = write_sites(tmp_path_factory.mktemp("sites"), PARTITION, 3, SEED)[1]
    return [f"folder:{folder}" for folder in folders]


def lines(log: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [text for record in log.records if (text := record.getMessage()).startswith(start)]


def test_a_number_in_a_text_gets_its_name_and_no_other_number_does() -> None:
    names = {10**19: "west", 11: "south"}
    said = {
        f"Node {10**19} is left out": f"west (node {10**19}) is left out",
        f"site 2 (node {10**19}): node 11 has its number": f"west (node {10**19}): south (node "
        "11) has its number",
        "Nodes [11, 12] have lost": "Nodes [south (node 11), 12] have lost",
        "Round 110 of 111, v11": "Round 110 of 111, v11",
    }
    assert {text: with_names(text, names) for text in said} == said
    assert with_names("node 12 of 110", {}) == "node 12 of 110"


def test_a_name_is_shown_in_one_line() -> None:
    class Odd(InProcessGrid):
        def get_nodes(self) -> list[NodeInfo]:
            return [NodeInfo(node_id=1000, name="north\n\x1b[31m")]

    sites = SitesByName(Odd(app, 1))
    assert (sites.get_node_ids(), sites.names) == ([1000], {1000: "north  [31m"})


def test_a_record_that_logging_cannot_write_ends_no_run() -> None:
    with sites_by_name(InProcessGrid(app, 1), ()), pytest.MonkeyPatch.context() as patch:
        # it would print what is wrong with the record
        patch.setattr(logging, "raiseExceptions", False)
        patch.setattr(FLOWER_LOGGER, "handlers", [logging.NullHandler()])
        patch.setattr(FLOWER_LOGGER, "propagate", False)
        FLOWER_LOGGER.info("%d nodes", "no")


def test_min_nodes_above_1_is_for_the_run_and_not_for_each_site(
    sites: list[str], tmp_path: Path
) -> None:
    options = {**OPTIONS, "clients": 3, "min-nodes": 2, "results-dir": str(tmp_path)}
    assert serve(Registered(sites, options), options)["rounds"] == 1


def test_each_rounds_line_names_who_is_missing_and_why(
    sites: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        **OPTIONS,
        "clients": 3,
        "min-nodes": 1,
        "rounds": 4,
        "timeout": 25,
        "results-dir": str(tmp_path),
    }
    grid = Registered(sites, options)
    grid.late, grid.failing = {2: {"west"}}, {4: {"west"}}
    grid.away = {3: {"south"}, 4: {"north", "south"}}
    serve(grid, options)
    told = [line.partition("; ")[2] for line in lines(caplog, "Round ") if " of 4: " in line]
    assert told == [
        "",
        "2 of 3 sites: west did not answer in 25 s",
        "2 of 3 sites: south was away",
        "0 of 3 sites: west was left out, north was away, south was away",
    ]
    missing = [row.get("left-out") for row in read_rounds(tmp_path)]
    assert missing == [None, ["west"], ["south"], ["west", "north", "south"]]
    assert lines(caplog, "west (node 1002) is left out of this round: ") == [
        "west (node 1002) is left out of this round: it failed: no power"
    ]


class Leaving(Registered):
    """Nodes that leave as soon as they have trained."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if messages[0].metadata.message_type == MessageType.TRAIN:
            gone = {self.site_names[message.metadata.dst_node_id] for message in messages}
            self.away = {self._round: gone, self._round + 1: gone}
        return replies


class Unscored(Registered):
    """Nodes of which one cannot evaluate."""

    def _answer(self, message: Message) -> Message:
        evaluates = message.metadata.message_type == MessageType.EVALUATE
        fails = evaluates and self.site_names[message.metadata.dst_node_id] == "west"
        return (
            Message(Error(0, "no power"), reply_to=message) if fails else super()._answer(message)
        )


class Empty(Registered):
    """Nodes of which the last has no data."""

    def __init__(self, data: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__([*data[:-1], "folder:/nowhere"], options)


NOT_YET, WEST = "2 of 3 sites: 1 never connected", {"west"}
#: nodes, options, who is away or fails in a round, and what the rounds' lines say of sites
MISSING: dict[str, tuple[type[Registered], dict[str, Any], dict[str, Any], list[str]]] = {
    "never came": (
        Registered,
        {"min-nodes": 2, "rounds": 2},
        {"away": {1: WEST, 2: WEST}},
        [NOT_YET, NOT_YET],
    ),
    "left after its training": (
        Leaving,
        {"clients": 0, "fraction-train": 0.4, "min-nodes": 1},
        {},
        [""],
    ),
    "not drawn": (Registered, {"clients": 0, "fraction-train": 0.4}, {}, [""]),
    "trains only": (Unscored, {}, {}, ["west did not evaluate"]),
    "late and without its data": (
        Empty,
        {"min-nodes": 1, "rounds": 2},
        {"away": {1: WEST}},
        [NOT_YET, "2 of 3 sites: west was refused"],
    ),
    "refused by a rule": (
        Registered,
        {"min-nodes": 1, "robust": "median", "rounds": 2},
        {"failing": {2: WEST}},
        ["", "0 of 3 sites: north was left out, south was left out, west was left out"],
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_rounds_line_tells_who_did_not_take_part_although_asked(
    case: str, sites: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, more, absences, told = MISSING[case]
    options = {**OPTIONS, "clients": 3, "results-dir": str(tmp_path), **more}
    grid = kind(sites, options)
    vars(grid).update(absences)
    serve(grid, options)
    assert [
        line.partition("; ")[2]
        for line in lines(caplog, "Round ")
        if f" of {options['rounds']}: " in line
    ] == told


def test_results_have_names(
    sites: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    options = {**OPTIONS, "method": "fedbn", "model": "small-cnn", "log-to": "tensorboard"}
    options["results-dir"] = str(tmp_path / "results")
    grid = Registered(sites, options)
    grid.changed = {number: {"site": name} for number, name in enumerate(NAMES)}
    summary = serve(grid, options)
    assert set(summary["sites"]) == set(read_rounds(tmp_path / "results")[0]["sites"]) == set(NAMES)
    assert [
        row["site"] for row in read_json(tmp_path / "results" / "config.json")["sites"]
    ] == list(NAMES)
    assert sorted(path.stem for path in (tmp_path / "models").glob("*/*")) == sorted(NAMES)
    assert lines(caplog, "south (node 1001): ")
    events = EventAccumulator(str(tmp_path / "results" / "tensorboard"))
    events.Reload()
    (curve,) = events.Scalars("sites/west/accuracy")
    assert (curve.step, curve.value) == (
        1,
        pytest.approx(summary["sites"]["west"]["accuracy"], abs=1e-6),
    )
    assert "accuracy" in events.Tags()["scalars"]


def test_a_site_that_cannot_answer_at_the_start_is_asked_again_if_others_suffice(
    sites: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(Registered):
        """West fails the first time."""

        def _answer(self, message: Message) -> Message:
            fails = message.metadata.dst_node_id == 1002 and not self.failing
            self.failing = self.failing or {9: {"west"}} if fails else self.failing
            return (
                Message(Error(0, "Node Unavailable"), reply_to=message)
                if fails
                else super()._answer(message)
            )

    options = {**OPTIONS, "clients": 3, "min-nodes": 2, "results-dir": str(tmp_path)}
    serve(Slow(sites, options), options)
    (line,) = lines(caplog, "west (node 1002) is not there at the start: ")
    assert line.endswith("it cannot say what its data are: Node Unavailable")
    assert [row["nodes"] for row in read_rounds(tmp_path)] == [3]


def test_errors_have_names(sites: list[str], tmp_path: Path) -> None:
    options = {**OPTIONS, "clients": 3, "results-dir": str(tmp_path / "one")}
    with pytest.raises(UsageError, match=r"^west \(node 1002\): it cannot|^west \(node 1002\): "):
        serve(Registered([*sites[:2], "folder:/gone"], options), options)
    grid = Registered(sites, options)
    grid.away = {1: {"south"}}
    with pytest.raises(
        CannotTrainError, match=r"^2 of 3 .*: north \(node 1000\), west \(node 1002\)$"
    ):
        serve(grid, options)
    misspelt = {**options, "clients": 0, "sites": "north,wset"}
    with pytest.raises(
        CannotTrainError, match=r"^1 of 2 .*: north \(node 1000\); not connected: wset$"
    ):
        serve(grid, misspelt)
    options = {**OPTIONS, "clients": 3, "rounds": 2, "results-dir": str(tmp_path / "two")}
    grid = Registered(sites, options)
    grid.away = {2: {"north"}}
    with pytest.raises(CannotTrainError, match=r"^2 of 3 "):
        serve(grid, options)
    assert read_json(tmp_path / "two" / "summary.json")["failed"].endswith(
        "south (node 1001), west (node 1002)"
    )


def test_sites_are_chosen_by_name_and_the_others_named_once(
    sites: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "clients": 3, "rounds": 2, "results-dir": str(tmp_path / "all")}
    with pytest.raises(
        UsageError, match=r"2 clients: they must be equal .*sites=NAME,NAME chooses"
    ):
        serve(Registered(sites, {}), {**options, "clients": 2})
    options = {**options, "clients": 0, "sites": "north,west", "results-dir": str(tmp_path / "two")}
    summary = serve(Registered(sites, options), options)
    assert (summary["clients"], set(summary["sites"])) == (2, {"north", "west"})
    assert lines(caplog, "Idle") == ["Idle, because `sites` does not name them: south"]
    # as if the others were not there
    alone = {**options, "sites": "", "results-dir": str(tmp_path / "alone")}
    grid = Registered(sites, alone)
    grid.away = {1: {"south"}, 2: {"south"}}
    serve(grid, alone)
    assert model_bytes(tmp_path / "two") == model_bytes(tmp_path / "alone")


def test_nodes_without_names_cannot_be_chosen() -> None:
    with pytest.raises(
        UsageError, match="sites='north' chooses by name, and these nodes have no names"
    ):
        SitesByName(InProcessGrid(app, 2), ["north"]).get_node_ids()


def test_a_site_whose_number_has_no_share_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        **OPTIONS,
        "dataset": "digits",
        "classes": "",
        "sites": "north,west",
        "results-dir": str(tmp_path),
    }
    summary = serve(Registered([""] * 3, options), options)
    assert summary["left-out"] == {"west": 1}
    (line,) = lines(caplog, "west (node 1002) is left out")
    assert line.endswith("this site has number 2, but 'digits' is split for the numbers 0 to 1: "
        "give more clients, or "
                         "a site its data")  # fmt: skip
