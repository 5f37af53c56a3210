"""A run that has diverged ends with the round, what came before, and what to try."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Message

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import Why
from fedbn_flwr.server.method_state import LostRounds
from fedbn_flwr.server.replies import Refusal
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid
from fedbn_flwr.strategies import CannotTrainError, DivergedError, FedAvg, FedTAN, FixBN
from tests.helpers.faults import Spoil, failed, infinite, spoiling
from tests.helpers.harness import ALONE, SIZES, Federation, make_model


def lost(_: Message, reply: Message) -> Message:
    for metrics in reply.content.metric_records.values():
        metrics[wire.TRAIN_LOSS] = float("inf")
    return reply


def test_three_rounds_without_a_finite_model_end_the_run_and_say_what_came_before() -> None:
    strategy = FixBN(freeze_round=2, frozen_lr=0.5)
    with pytest.raises(DivergedError) as error:
        Federation(make_model(), grid=spoiling(infinite, lambda _, number: number >= 3)).run(
            strategy, 60
        )
    assert error.value.server_round == 3
    assert strategy.round.number == 5
    assert str(error.value) == (
        "training diverged at round 3: no node has had a usable reply since (node 1000: its array "
        "'net.0.weight' in "
        "'arrays' is not finite); BN is frozen after round 2, the learning rate is 0.05, by "
        "frozen-lr=0.5: try "
        "frozen-lr below 0.5, or a later freeze"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"frozen_lr": 0.2, "lr_schedule": "0.1@2"},
            "0.01, by the schedule: try frozen-lr below 0.1, or a later freeze",
        ),
        ({"lr_schedule": "=0.3@freeze"}, "0.3: try a lower learning rate, or a later freeze"),
        ({"freeze": "affine"}, "0.1: try a lower learning rate, or a later freeze"),
    ],
    ids=str,
)
def test_it_says_what_bounded_the_learning_rate_and_below_what_it_must_go(
    options: dict[str, Any], said: str
) -> None:
    strategy = FixBN(freeze_round=2, **options)
    with pytest.raises(
        DivergedError, match=rf"frozen after round 2, the learning rate is {re.escape(said)}$"
    ):
        Federation(make_model(), grid=spoiling(infinite, lambda _, number: number >= 3)).run(
            strategy, 60
        )


def mixed(message: Message, reply: Message) -> Message:
    return (infinite if message.metadata.dst_node_id == FIRST_NODE_ID else failed)(message, reply)


BLAMED = r"at round 3: .*\); the learning rate is 0\.1: try a lower learning rate$"
NO_LOSS = "diverged at round 2: no node's training loss is finite; the learning rate"
FIRST = r"at round 1: no node could train \(node 1000: .*the learning rate"
UNKNOWN = "the first that asks for freeze, omit"
FRUITLESS = "^10 rounds in a row brought no usable reply: node 1000: .*no power"
#: a strategy, the nodes' sizes, what becomes of replies and from which round on, the error, and the
#: last round
ENDS: dict[str, tuple[FedAvg, tuple[int, ...], Spoil, int, type[Exception], str, int]] = {
    # neither the freeze nor the schedule that came after the first lost round is to blame
    "before a freeze": (FixBN(freeze_round=50), SIZES, infinite, 3, DivergedError, BLAMED, 5),
    "with a later schedule": (
        FixBN(freeze_round=3, lr_schedule="0.1@4"),
        SIZES,
        infinite,
        3,
        DivergedError,
        BLAMED,
        5,
    ),
    "of one node": (
        FedAvg(**ALONE),
        (9,),
        infinite,
        2,
        DivergedError,
        "at round 2: .* is not finite",
        4,
    ),
    "layer-wise": (FedTAN(), SIZES, infinite, 2, DivergedError, "at round 2: .* is not finite", 4),
    "without a finite loss": (FedAvg(), SIZES, lost, 2, DivergedError, NO_LOSS, 2),
    "without one of the only node": (FedAvg(**ALONE), (9,), lost, 2, DivergedError, NO_LOSS, 2),
    "without one of half": (FedAvg(fraction_train=0.5), SIZES, lost, 2, DivergedError, NO_LOSS, 2),
    "from the start": (FedAvg(), SIZES, infinite, 1, DivergedError, FIRST, 1),
    "of nodes that fail": (FedAvg(), SIZES, failed, 3, CannotTrainError, FRUITLESS, 12),
    "of nodes that know no freeze": (
        FixBN(freeze_round=2),
        SIZES,
        mixed,
        3,
        CannotTrainError,
        UNKNOWN,
        3,
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_end_of_a_run_that_trains_no_more(case: str) -> None:
    strategy, sizes, spoil, begins, error, said, last = ENDS[case]
    with pytest.raises(error, match=said) as ended:
        Federation(
            make_model(), sizes, grid=spoiling(spoil, lambda _, number: number >= begins)
        ).run(strategy, 60)
    # nodes that fail are not taken for diverging ones
    assert isinstance(ended.value, DivergedError) == (error is DivergedError)
    assert strategy.round.number == last


@pytest.mark.parametrize(
    "spoils",
    [
        lambda _, number: number in (3, 4, 6, 7),
        lambda partition, number: partition != 2 and number > 2,
    ],
    ids=["two rounds in a row", "all nodes but one"],
)
def test_as_long_as_something_is_learned_a_run_goes_on(spoils: Callable[[int, int], bool]) -> None:
    strategy = FedAvg()
    Federation(make_model(), grid=spoiling(infinite, spoils)).run(strategy, 8)
    assert strategy.round.number == 8
    assert strategy.training.replies


class Leaving(InProcessGrid):
    """A grid with two nodes, once its four have trained."""

    def get_node_ids(self) -> list[int]:
        nodes = list(super().get_node_ids())
        return nodes[: 2 if self.trained else 4]

    trained = False

    def _answer(self, message: Message) -> Message:
        self.trained |= message.metadata.message_type == "train"
        return super()._answer(message)


@pytest.mark.parametrize(
    ("options", "needed"),
    [({"robust": "median"}, 3), ({"robust": "trimmed:0.25"}, 4)],
)
def test_a_run_ends_if_fewer_nodes_are_left_than_its_method_needs(
    options: dict[str, Any], needed: int
) -> None:
    with pytest.raises(
        CannotTrainError, match=f"^2 of {needed} nodes connected within 0 seconds: node "
    ):
        Federation(make_model(), grid=Leaving).run(FedAvg(patience=0, **options), 60)


def test_one_bad_node_among_others_does_not_end_a_run_in_which_it_is_drawn_again_and_again() -> (
    None
):
    rounds, dead = LostRounds(), Refusal(8, "it failed: no power")
    bad = Refusal(7, "its array 'a' is not finite", Why.INFINITE)
    for number in range(1, 9):
        rounds.add(number, [bad, dead], 4, "")
    with pytest.raises(DivergedError):
        rounds.add(9, [Refusal(8, "the mean of BN layer 'a' is too large", Why.INFINITE)], 4, "")


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_one_nodes_infinite_loss_does_not(fraction: float) -> None:
    strategy = FedAvg(fraction_train=fraction, min_train_nodes=1)
    Federation(make_model(), grid=spoiling(lost, lambda partition, _: partition == 1)).run(
        strategy, 9
    )
    assert strategy.round.number == 9


def test_the_error_survives_a_process() -> None:
    error = pickle.loads(pickle.dumps(DivergedError(46, "no node")))
    assert (str(error), error.server_round) == ("training diverged at round 46: no node", 46)
