"""What a node keeps in a folder of its site outlives its SuperNode, and a server's resumed run
finds what counts.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedbn_flwr import state
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.client.node_memory import STATE_VARIABLE
from fedbn_flwr.clientapp import client_app, keep_local, keep_states, keep_states_in
from fedbn_flwr.clientapp.mods import KeptStates
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import Arrays
from fedbn_flwr.state.record_files import read_records
from fedbn_flwr.strategies import REGISTRY, FedBN
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.history import History
from tests.helpers.harness import SIZES, Federation, make_model

FORGETFUL = 1002


class Restarting(InProcessGrid):
    """A grid that forgets what one node remembers after each of its messages, as if its SuperNode
    started again.
    """

    def _keep(self, node: int, context: Context) -> None:
        super()._keep(node, replace(context, state=RecordDict()) if node == FORGETFUL else context)


METHODS: dict[str, dict[str, Any]] = {
    "fedbn": {},
    "silobn": {"fraction_train": 0.5},
    "standalone": {},
    "fedavg": {"momentum_state": "local"},
    "scaffold": {},
    "fixbn": {"freeze_round": "auto", "window": 2, "threshold": 5.0},
    "fedtan": {"momentum_state": "local"},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_node_that_starts_again_goes_on_with_its_state(name: str, tmp_path: Path) -> None:
    whole, restarted = (
        Federation(make_model()),
        Federation(make_model(), grid=Restarting, mods=[keep_states_in(tmp_path)]),
    )
    one, other = (
        nodes.run(REGISTRY[name](**METHODS[name]), 5, momentum=0.5) for nodes in (whole, restarted)
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not restarted.grid.context(FORGETFUL).state
    (file,) = tmp_path.glob("*/2/*.records")
    assert dict(read_records(file)) == dict(whole.grid.context(FORGETFUL).state)


def test_states_are_kept_whatever_the_order_of_mods_is(tmp_path: Path) -> None:
    whole = Federation(make_model(), mods=[keep_local("1.*")])
    restarted = Federation(
        make_model(), grid=Restarting, mods=[keep_local("1.*"), keep_states_in(tmp_path)]
    )
    one, other = (nodes.run(REGISTRY["fedavg"](), 3) for nodes in (whole, restarted))
    assert all(torch.equal(one[key], other[key]) for key in one)
    (file,) = tmp_path.glob("*/2/*.records")
    assert dict(read_records(file)) == dict(whole.grid.context(FORGETFUL).state)


class Watched(FedBN):
    """Notes who trained in each round, and the model that the round started from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **options)
        self.trained: list[list[int]] = []
        self.began: list[Arrays] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        self.trained.append([reply.node for reply in self.training.replies])
        self.began.append(self.round.current)
        return result


class Unaddressed(Restarting):
    """Its nodes' mods answer without saying which message, and in the middle of a round a second
    time.
    """

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = list(message_ids)
        replies = list(super().pull_messages(asked))
        for reply in replies:
            reply.metadata.__dict__["_reply_to_message_id"] = ""
        return replies * (1 if len(asked) == len(SIZES) else 2)


@pytest.mark.parametrize("grid", [Restarting, Unaddressed])
def test_a_node_without_its_state_is_named_and_trains_in_the_same_round(
    grid: type[Restarting], caplog: pytest.LogCaptureFixture
) -> None:
    strategy, nodes = Watched(), Federation(make_model(), grid=grid)
    nodes.run(strategy, 3)
    assert strategy.trained == [[1000, 1001, 1002, 1003]] * 3
    named = [text for text in caplog.messages if "have lost the entries that stay on them" in text]
    assert (
        named
        == [
            f"Nodes [{FORGETFUL}] have lost the entries that stay on them: they get the whole model"
        ]
        * 2
    )


def test_who_has_failed_gets_the_whole_model_next_time_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = BNClient.train

    def failing(client: BNClient, received: Any, instruction: Instruction) -> Reply:
        if client.partition_id == 1 and instruction.server_round == 2:
            raise RuntimeError("I was told to")
        return train(client, received, instruction)

    monkeypatch.setattr(BNClient, "train", failing)
    strategy, nodes = Watched(), Federation(make_model(), grid=Restarting)
    nodes.run(strategy, 2)
    assert strategy.trained == [[1000, 1001, 1002, 1003], [1000, 1002, 1003]]
    packages = strategy.package(list(nodes.grid.get_node_ids()), nodes.initial)
    assert [node for node, groups in packages.items() if "net.1.weight" in groups["arrays"]] == [
        1001
    ]


def test_it_starts_from_the_servers_values_of_what_it_lost() -> None:
    seen: list[dict[str, torch.Tensor]] = []

    class Seeing(Restarting):
        def _answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id == FORGETFUL:
                seen.append(state.from_record(message.content.array_records["arrays"]))
            return super()._answer(message)

    strategy = Watched()
    nodes = Federation(make_model(), grid=Seeing)
    nodes.run(strategy, 2)
    first, asked, again = seen
    assert asked.keys() < again.keys() == first.keys()
    assert all(
        torch.equal(again[name], torch.from_numpy(value))
        for name, value in strategy.began[1].items()
    )


def test_an_evaluation_without_the_state_is_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = FedBN(fraction_evaluate=1.0, min_evaluate_nodes=1)
    Federation(make_model(), grid=Restarting).run(strategy, 1)
    assert [reply.node for reply in strategy.evaluation.replies] == [1000, 1001, 1003]
    text = f"Node {FORGETFUL} is left out of this round: it has lost the entries that stay on it"
    assert text in caplog.messages


# ---- which states count --------------------------------------------------------------------------


class Site:
    """A node's folder, seen by one message after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def states(self, server_round: int, history: str, checkpoint: int) -> KeptStates:
        config = ConfigRecord(
            {"server-round": server_round, "state-history": history, "checkpoint": checkpoint}
        )
        run = int(History.parse(history).present)
        return KeptStates(
            self.folder, Context(run, 9, {"partition-id": 4}, RecordDict(), {}), config
        )

    def train(self, server_round: int, history: str, checkpoint: int = 0) -> int:
        """Take part in a round; returns the round that the node remembers having taken part in
        before.
        """
        states = self.states(server_round, history, checkpoint)
        before = states.recall()
        states.keep(RecordDict({"m": MetricRecord({"round": server_round})}))
        return int(before.metric_records["m"]["round"]) if before else 0  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*.records*"))


def test_only_the_latest_state_is_kept_and_that_of_the_checkpoint(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert [site.train(number, "71") for number in (1, 2, 3)] == [0, 1, 2]
    assert site.names == ["3-71.records"]
    assert site.train(4, "71", checkpoint=3) == 3
    assert site.train(6, "71", checkpoint=3) == 4
    assert site.names == ["3-71.records", "6-71.records"]
    assert site.train(9, "71", checkpoint=8) == 6
    assert site.names == ["6-71.records", "9-71.records"]
    assert [path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.records")] == [
        ("71", "4")
    ] * 2


def test_a_resumed_run_goes_on_with_the_checkpoints_state_and_forgets_what_came_after(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    for number in (1, 2, 3, 4):
        site.train(number, "71", checkpoint=2 * (number > 2))
    assert site.names == ["2-71.records", "4-71.records"]
    # the same round again, by another run
    assert site.train(4, "71:2,72", checkpoint=2) == 2
    assert site.names == ["2-71.records", "4-72.records"]
    # which dies before its first checkpoint
    assert site.train(3, "71:2,72:2,73", checkpoint=2) == 2
    assert site.train(5, "71:2,72:2,73", checkpoint=4) == 3


def test_a_round_that_a_dead_run_had_done_does_not_count_later_either(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.train(2, "71"), site.train(4, "71", checkpoint=3)
    # the node takes part again only after round 4 was done without it
    assert site.train(7, "71:3,72", checkpoint=6) == 2


def test_a_state_that_did_not_change_is_not_written(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.train(1, "71")
    states = site.states(2, "71", 0)
    states.keep(states.recall())
    assert site.names == ["1-71.records"]


# ---- where a site names its folder ---------------------------------------------------------------


def count(message: Message, context: Context) -> Message:
    before = int(context.state.metric_records.get("n", {"n": 0})["n"])  # type: ignore[arg-type]
    context.state["n"] = MetricRecord({"n": before + 1})
    return Message(RecordDict({"n": context.state.metric_records["n"]}), reply_to=message)


def ask(folder: str | None, config: dict[str, int]) -> int:
    message = Message(
        RecordDict({"config": ConfigRecord(dict(config))}), dst_node_id=1, message_type="train"
    )
    place = {} if folder is None else {"state-dir": folder}
    reply = keep_states(
        message, Context(1, 9, {"partition-id": 4, **place}, RecordDict(), {}), count
    )
    return int(reply.content.metric_records["n"]["n"])  # type: ignore[arg-type]


def test_the_node_configuration_or_the_environment_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [ask(None, {"server-round": 1}) for _ in range(2)] == [1, 1]
    assert [ask(str(tmp_path / "a"), {"server-round": number}) for number in (1, 2)] == [1, 2]
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "b"))
    assert [ask(None, {"server-round": number}) for number in (1, 2)] == [1, 2]
    assert ask(str(tmp_path / "a"), {"server-round": 3}) == 3
    # messages that are of no round change nothing
    assert [ask(None, {}) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("history", "partition", "named"),
    [
        ("../x:1,1", 4, "state-history must be a number from 0 on, got '../x'"),
        ("2:../x,1", 4, "state-history must be"),
        ("2,1", 4, "state-history must be a number from 0 on, got ''"),
        ("2:1,../x", 4, "state-history must be"),
        ("2:1,3", 4, "state-history is that of run 3, and this is run 1"),
        ("1", "../x", "partition-id must be a number from 0 on, got '../x'"),
    ],
)
def test_what_is_not_a_number_names_no_folder(
    history: str, partition: Any, named: str, tmp_path: Path
) -> None:
    app = client_app(
        lambda _: pytest.fail("no client is due"), mods=[keep_states_in(tmp_path / "states")]
    )
    config = ConfigRecord({"server-round": 1, "state-history": history})
    message = Message(RecordDict({"config": config}), dst_node_id=1, message_type="train")
    reason = str(
        app(message, Context(1, 9, {"partition-id": partition}, RecordDict(), {})).error.reason
    )
    assert named in reason
    assert "\n" not in reason
    assert not list(tmp_path.iterdir())
