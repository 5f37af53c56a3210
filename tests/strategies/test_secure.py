"""Every method under masks beside the same one in the clear, in float64; drop-outs; and all bytes that nodes send."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.secure import fixed_point, masks
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import (
    HBN,
    REGISTRY,
    FedAvg,
    FedBN,
    FedBS,
    FedNorm,
    FedTAN,
    FixBN,
    Privacy,
    Scaffold,
)
from fedbn_flwr.transports.message_client import STEPS
from fedbn_flwr.wire import masked
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, Traffic, distance, make_model

Options = dict[str, Any]
#: every method that can, as it is and with options that change what is sent
CASES: dict[str, tuple[Any, Options]] = {
    **{name: (REGISTRY[name], {}) for name in sorted(REGISTRY.keys() - {"centralized", "standalone", "fednorm"})},
    "uniform": (FedAvg, {"weighting": "uniform"}),
    "momentum": (FedAvg, {"momentum_state": "global"}),
    "server optimizer": (FedAvg, {"server_optimizer": "adam"}),
    "frozen": (FixBN, {"freeze_round": 1}),
    "losses that agree": (FedBS, {"epsilon": 10.0, "patience_rounds": 1}),
    "running losses": (FedBS, {"loss": "running"}),
    "the paper's exchanges": (FedTAN, {"exchange": "paper"}),
    "uniform exchanges": (FedTAN, {"weighting": "uniform"}),
    "uniform variates": (Scaffold, {"weighting": "uniform"}),
}


def federation(kind: type[FedAvg], options: Options, **more: Any) -> Federation:
    own = kind.own_norm(options)
    return Federation(make_model(own[0], **own[1]) if own else make_model(), **more)


@pytest.mark.parametrize("case", CASES)
def test_under_masks_it_is_the_same_method(case: str) -> None:
    kind, options = CASES[case]
    plain, hidden = (federation(kind, options).run(kind(secure=hidden, **options), 2) for hidden in (False, True))
    assert distance(plain, hidden) < 1e-9


@pytest.mark.parametrize("kind", [FedAvg, FedTAN])
def test_nodes_that_have_said_how_many_examples_they_have_are_not_compared_with_sums(kind: type[FedAvg]) -> None:
    """As in a run that is resumed, in which nodes describe themselves first."""
    asked, plain = Federation(make_model()), Federation(make_model())
    strategy = kind(secure=True)
    strategy.describe(asked.grid, list(asked.grid.get_node_ids()))
    assert distance(asked.run(strategy), plain.run(kind(secure=True))) < 1e-9


@pytest.mark.parametrize("threshold", [0.0, 1e9])
def test_the_rule_auto_freezes_in_the_same_round(threshold: float) -> None:
    kinds = [
        FixBN(freeze_round="auto", window=2, threshold=threshold, latest=1, secure=secure) for secure in (False, True)
    ]
    plain, hidden = (Federation(make_model()).run(kind, 6) for kind in kinds)
    assert distance(plain, hidden) < 1e-9
    assert kinds[0].frozen_after == kinds[1].frozen_after
    assert (kinds[0].frozen_after is None) == (threshold == 0)


def test_the_spread_of_losses_is_that_in_the_clear() -> None:
    kinds = [FedBS(secure=secure) for secure in (False, True)]
    for kind in kinds:
        Federation(make_model()).run(kind, 1)
    assert kinds[1].measured["loss-deviation"] == pytest.approx(kinds[0].measured["loss-deviation"], rel=1e-9)


def looking(hook: str) -> FedAvg:
    """Return a method of a user's own that overrides a hook."""
    own: Any = type("Own", (FedAvg,), {hook: lambda *_: None})
    return own(secure=True)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], FedAvg], str]] = {
    "domains": (lambda: FedNorm(secure=True), "its own `weigh` may look at single replies"),
    "carried": (lambda: FedTAN(secure=True, carry=True), "single replies for values that carry=true keeps"),
    "privacy": (
        lambda: FedAvg(secure=True, weighting="uniform", privacy=Privacy(1.0, 0.1)),
        "clips each node's update",
    ),
    "robust": (lambda: FedAvg(secure=True, robust="median"), "compares the nodes' replies"),
    "personal means": (
        lambda: FedBN(secure=True, mean_personal=True),
        "single replies for the entries that nodes keep",
    ),
    "a part of the nodes": (lambda: FedAvg(secure=True, fraction_train=0.5), "fraction_train must be 1"),
    "another weight": (lambda: FedAvg(secure=True, weighted_by_key="train-loss"), "weighs by 'train-loss'"),
    **{
        f"a user's {hook}": (partial(looking, hook), f"its own `{hook}` may look at single replies")
        for hook in ("weigh", "merge", "pool", "mean", "aggregate_train", "aggregate_evaluate")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_single_replies_is_refused_by_name(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(ValueError, match=f"cannot run with secure=true: .*{reason}"):
        Federation(make_model()).run(make())


# ---- what leaves a node ---------------------------------------------------------------------------------------------


class Numbers:
    """All numbers of single nodes, as they are before they are masked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[np.ndarray] = []
        before = masked.to_numbers

        def noting(content: Any, terms: masked.Terms) -> Any:
            for record in content.array_records.values():
                self.seen += [np.asarray(array.numpy(), np.float64).ravel() for array in record.values()]
            form, numbers = before(content, terms)
            self.seen.append(numbers)
            return form, numbers

        monkeypatch.setattr(masked, "to_numbers", noting)

    def patterns(self) -> set[bytes]:
        """The bytes of every number that is not one of a few anybody could guess, as float64, float32 and limbs."""
        numbers = np.unique(np.concatenate(self.seen))
        numbers = numbers[np.abs(numbers * 1024 % 1) > 0]
        limbs = fixed_point.encode(numbers, 4)
        return {
            *(number.tobytes() for number in numbers),
            *(number.byteswap().tobytes() for number in numbers),
            *(limb.tobytes() for limb in limbs[1]),
        }


def sent_bytes(replies: Iterable[Message]) -> Iterable[bytes]:
    """Everything in the nodes' replies, and that it is of the kinds that a masked reply has."""
    for reply in replies:
        for name in reply.content:
            if name == masked.MASKED and reply.content.array_records:
                (array,) = reply.content.array_records[name].values()
                assert array.dtype == "uint64"
                yield array.numpy().tobytes()
                continue
            values: Mapping[str, Any] = reply.content[name]
            for key, value in values.items():
                if name == wire.METRICS:  # of a description, or a sign; partitions are names of nodes
                    assert (key, value) in [(wire.NUM_EXAMPLES, 0), (wire.PARTITION_ID, value), (wire.DOMAIN, -1)]
                    continue
                if key == "partition":
                    continue
                texts = value if isinstance(value, list) else [value]
                assert all(isinstance(text, str | bytes) for text in texts), (name, key, value)
                yield from (text if isinstance(text, bytes) else text.encode() for text in texts)


def leaks(kind: type[FedAvg], options: Options, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many numbers of single nodes the server finds, in what they send and without the masks that it opens."""
    numbers, opened = Numbers(monkeypatch), list[bytes]()
    cancel = masks.cancel

    def opening(total: Any, participants: Any, own: Any, absent: Any) -> Any:
        own = list(own)
        for seed in own:
            for reply in grid.replies:
                if reply.has_content() and masked.MASKED in reply.content.array_records:
                    hidden = reply.content.array_records[masked.MASKED]["sum"].numpy()
                    opened.append(cancel(hidden, participants, [seed], {}).tobytes())
        return cancel(total, participants, own, absent)

    monkeypatch.setattr(masks, "cancel", opening)
    nodes = federation(kind, options, grid=Traffic)
    grid: Any = nodes.grid
    nodes.run(kind(secure=True, **options), 2, evaluate_every=1)
    patterns = numbers.patterns()
    assert len(patterns) > 1000
    haystacks = [*sent_bytes(grid.replies), *opened]
    words = {text[start : start + 8] for text in haystacks for start in range(0, len(text) - 7, 8)}
    return len(patterns & words)


BYTES: dict[str, tuple[type[FedAvg], Options]] = {
    "fedavg": (FedAvg, {"momentum_state": "global"}),
    "fedtan": (FedTAN, {}),
    "scaffold": (Scaffold, {}),
    "hbn": (HBN, {}),
}


@pytest.mark.parametrize("case", BYTES)
def test_no_byte_that_is_sent_shows_a_number_of_one_node(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaks(*BYTES[case], monkeypatch) == 0


def test_the_server_would_find_them_without_pairwise_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_pair_stream", lambda *_: (masks._stream(b""), lambda *_: None))
    assert leaks(FedAvg, {}, monkeypatch) > 100


def test_the_server_would_find_those_of_an_exchange_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = masks.mask

    def bare_in_exchanges(values: Any, node: int, private: bytes, participants: Any, own: bytes = b"") -> Any:
        return before(values, node, private, participants, own) if own else fixed_point.encode(values, 4)

    monkeypatch.setattr(masks, "mask", bare_in_exchanges)
    assert leaks(FedTAN, {}, monkeypatch) > 10


def test_a_hook_gets_no_reply_of_a_single_node_by_pushing_messages() -> None:
    class Pushing(FedAvg):
        def refine(self, merged: Any) -> Any:
            self.grid.push_messages([Message(message.content, 1000, "train") for message in self._sent[:1]])
            return merged

    with pytest.raises(RuntimeError, match="nodes are asked by `send_and_receive`, which returns a mean"):
        Federation(make_model()).run(Pushing(secure=True), 1)


# ---- nodes that are lost -------------------------------------------------------------------------------------------


#: as many nodes as a sum needs to bear the loss of one
FIVE = (*SIZES, 9)


class Losing(Traffic):
    """A grid that loses messages: those for which `lose` says so, by node and what is asked."""

    lose: Callable[[int, str], bool] = staticmethod(lambda node, what: False)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = {message.metadata.message_id: message for message in self.sent}
        replies = list(super().pull_messages(message_ids))
        return [
            Message(Error(ErrorCode.UNKNOWN, "gone"), reply_to=asked[reply.metadata.reply_to_message_id])
            if self.lose(*what_is_asked(asked[reply.metadata.reply_to_message_id]))
            else reply
            for reply in replies
        ]


def what_is_asked(message: Message) -> tuple[int, str]:
    """The node, and what it was asked: `keys`, `open`, or the kind of the message with its round."""
    asked: Any = message.content.config_records.get(masked.SECURE, {})
    kind = message.metadata.message_type
    if kind == masked.SECURE_QUERY:
        return message.metadata.dst_node_id, "open" if "survivors" in asked else "keys"
    config: Any = message.content.config_records.get(wire.CONFIG, {})
    return message.metadata.dst_node_id, f"{kind} {config.get('server-round')}"


def run_losing(
    lose: Callable[[int, str], bool], strategy: FedAvg | None = None, **instruction: Any
) -> tuple[Federation, state.State]:
    nodes = Federation(make_model(), FIVE, grid=Losing)
    nodes.grid.lose = lose  # type: ignore[attr-defined]
    strategy = strategy or FedAvg(secure=True, fraction_evaluate=0.0, min_train_nodes=4)
    return nodes, nodes.run(strategy, 2, **instruction)


def test_a_node_lost_before_its_reply_is_not_in_the_sum() -> None:
    (first, *_) = Federation(make_model()).grid.get_node_ids()
    plain = FedAvg(fraction_evaluate=0.0, min_train_nodes=4)
    (_, found), (_, wanted) = (
        run_losing(lambda node, what: (node, what) == (first, "train 1"), strategy) for strategy in (None, plain)
    )
    assert distance(found, wanted) < 1e-9


def test_a_node_lost_after_its_reply_still_counts() -> None:
    opened = list[int]()

    def lose(node: int, what: str) -> bool:
        opened.append(node) if what == "open" else None
        return what == "open" and len(opened) == 2

    _, found = run_losing(lose)
    assert distance(found, Federation(make_model(), FIVE).run(FedAvg(fraction_evaluate=0.0), 2)) < 1e-9


def test_a_sum_needs_more_than_three_quarters_of_its_nodes_whatever_the_minimum_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With so few, a server that has named other nodes to some could open two sums; it does not even ask."""
    nodes = Federation(make_model(), (6,) * 7, grid=Losing)
    lost, grid = set(list(nodes.grid.get_node_ids())[:2]), cast(Losing, nodes.grid)
    grid.lose = lambda node, what: node in lost and what == "train 2"
    found = nodes.run(FedAvg(secure=True, fraction_evaluate=0.0, min_train_nodes=7), 2)
    assert distance(found, Federation(make_model(), (6,) * 7).run(FedAvg(fraction_evaluate=0.0), 1)) < 1e-9
    assert "replies of 5 of 7 nodes came, and a sum needs 6" in caplog.text
    assert [what_is_asked(message)[1] for message in grid.sent].count("open") == 7


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("two replies", "replies of 3 of 5 nodes came, and a sum needs 4"),
        ("a reply, and another node's help", "masks with nodes .* do not cancel"),
        ("the help of two", "it did not help to open the sum: gone"),
    ],
)
def test_a_round_that_cannot_be_right_is_skipped_by_name(
    lost: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = Federation(make_model()).grid.get_node_ids()
    losses = {
        "two replies": {(first, "train 2"), (second, "train 2")},
        "a reply, and another node's help": {(first, "train 2"), (second, "open")},
        "the help of two": {(first, "open"), (second, "open")},
    }[lost]
    rounds = 0

    def lose(node: int, what: str) -> bool:
        nonlocal rounds
        rounds = max(rounds, int(what[-1]) if what[-1].isdigit() else 0)
        return rounds == 2 and (node, what) in losses

    _, found = run_losing(lose)
    assert distance(found, Federation(make_model(), FIVE).run(FedAvg(fraction_evaluate=0.0), 1)) < 1e-9
    assert "brought no usable reply" in caplog.text
    assert re.search(reason, caplog.text)


@pytest.mark.parametrize("batch_size", [3, 4])
def test_an_exchange_that_loses_a_node_starts_again_without_it_and_with_other_batches(
    batch_size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node with five samples has them all in a mini-batch of four, to which the fifth is added: it has no other."""
    first, *_ = Federation(make_model()).grid.get_node_ids()
    asked, drawn = list[str](), dict[int, set[int]]()
    plan = BNClient.plan

    def noting(self: BNClient, instruction: Any, *more: Any) -> Any:
        drawn.setdefault(self.partition_id, set()).add(instruction.seed)
        return plan(self, instruction, *more)

    def lose(node: int, what: str) -> bool:
        if node == first and what == f"{wire.LAYERWISE} 1":
            asked.append(what)
        return node == first and len(asked) > 1 and what == f"{wire.LAYERWISE} 1"

    monkeypatch.setattr(BNClient, "plan", noting)
    strategy = FedTAN(secure=True, fraction_evaluate=0.0, min_train_nodes=4)
    nodes, _ = run_losing(lose, strategy, batch_size=batch_size)
    grid: Any = nodes.grid
    positions = [message.content.config_records.get("position") for message in grid.sent]
    assert {position["attempt"] for position in positions if position} == ({1, 2} if batch_size == 3 else {1, 2, 3})
    assert len(drawn.pop(0)) == 1
    assert ("this node's mini-batch is all of its samples" in caplog.text) == (batch_size == 4)
    secret = [seeds - {INSTRUCTION.seed} for seeds in drawn.values() if len(seeds) > 1]
    assert len(secret) >= 3
    assert not set.intersection(*secret)


@pytest.mark.parametrize(
    ("kind", "secure", "counted"),
    [
        (FedAvg, False, [6, 4, 4, 4]),
        (FedTAN, False, [6, 4, 4, 4]),
        (FedAvg, True, [6, 0, 4, 4]),
        (FedTAN, True, [6, 4, 4, 4]),
    ],
)
def test_a_run_goes_on_without_a_third_of_its_nodes(
    kind: type[FedAvg], secure: bool, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From round 2 on, two of six fail in all that they are asked; under masks, they are then asked for no sum."""
    nodes, gone, found = Federation(make_model(), (6,) * 6, grid=Losing), list[str](), list[int]()
    lost, grid = list(nodes.grid.get_node_ids())[:2], cast(Losing, nodes.grid)

    def lose(node: int, what: str) -> bool:
        if node in lost and what.endswith(" 2"):
            gone.append(what)
        return node in lost and bool(gone)

    grid.lose = lose
    strategy = kind(secure=secure, fraction_evaluate=0.0)
    aggregate = strategy.aggregate_train

    def noting(server_round: int, replies: Iterable[Message]) -> Any:
        result = aggregate(server_round, replies)
        found.append(sum(len(reply.nodes) for reply in strategy.train_replies))
        return result

    monkeypatch.setattr(strategy, "aggregate_train", noting)
    after = nodes.run(strategy, 4, batch_size=2)
    assert found == counted
    assert all(value.isfinite().all() for value in after.values())


def test_nodes_that_forget_their_arrays_take_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every message of a step, as where each has a process of its own and may keep no arrays."""

    class Forgetful(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            STEPS.pop((1, message.metadata.dst_node_id), None)
            return super()._answer(message)

    def train(grid: type[InProcessGrid]) -> state.State:
        return Federation(make_model(), grid=grid).run(FedTAN(secure=True, fraction_evaluate=0.0), 2)

    kept = train(InProcessGrid)
    monkeypatch.setattr("fedbn_flwr.transports.message_client.REPLAY_LIMIT", 0)
    forgotten = train(Forgetful)
    assert distance(kept, forgotten) == 0


def test_two_nodes_are_too_few() -> None:
    with pytest.raises(RuntimeError, match="a sum of 2 nodes would show too much of each: 3 at least"):
        Federation(make_model(), SIZES[:2]).run(FedAvg(secure=True))
