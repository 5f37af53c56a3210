"""A run that has diverged ends with the round, what came before, and what to try."""

import pickle
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
from tests.helpers.faults import failed, infinite, spoiling
from tests.helpers.harness import ALONE, SIZES, Federation, make_model


def lost(_: Message, reply: Message) -> Message:
    for metrics in reply.content.metric_records.values():
        metrics[wire.TRAIN_LOSS] = float("inf")
    return reply


def test_three_rounds_without_a_finite_model_end_the_run_and_say_what_came_before() -> None:
    strategy = FixBN(freeze_round=2, frozen_lr=0.5)
    with pytest.raises(DivergedError) as error:
        Federation(make_model(), grid=spoiling(infinite, lambda _, number: number >= 3)).run(strategy, 60)
    assert error.value.server_round == 3
    assert strategy.round.number == 5
    assert str(error.value) == (
        "training diverged at round 3: no node has had a usable reply since (node 1000: its array 'net.0.weight' in "
        "'arrays' is not finite); BN is frozen after round 2, the learning rate is 0.05: try a lower learning rate "
        "(frozen-lr), or a later freeze"
    )


@pytest.mark.parametrize("options", [{"freeze_round": 50}, {"freeze_round": 3, "lr_schedule": "0.1@4"}])
def test_the_rate_of_the_first_lost_round_is_to_blame(options: dict[str, Any]) -> None:
    """Neither the freeze nor the schedule that came after it."""
    grid = spoiling(infinite, lambda _, number: number >= 3)
    with pytest.raises(DivergedError, match=r"at round 3: .*\); the learning rate is 0\.1: try a lower learning rate$"):
        Federation(make_model(), grid=grid).run(FixBN(**options), 60)


def test_a_run_of_one_node_and_a_layer_wise_one_diverge_as_well() -> None:
    for strategy, sizes in ((FedAvg(**ALONE), (9,)), (FedTAN(), SIZES)):
        grid = spoiling(infinite, lambda _, number: number >= 2)
        with pytest.raises(DivergedError, match=r"diverged at round 2: .* is not finite"):
            Federation(make_model(), sizes, grid=grid).run(strategy, 60)


@pytest.mark.parametrize(
    "spoils",
    [lambda _, number: number in (3, 4, 6, 7), lambda partition, number: partition != 2 and number > 2],
    ids=["two rounds in a row", "all nodes but one"],
)
def test_as_long_as_something_is_learned_a_run_goes_on(spoils: Callable[[int, int], bool]) -> None:
    strategy = FedAvg()
    Federation(make_model(), grid=spoiling(infinite, spoils)).run(strategy, 8)
    assert strategy.round.number == 8
    assert strategy.training.replies


def test_ten_rounds_in_which_nodes_fail_end_a_run() -> None:
    strategy = FedAvg()
    with pytest.raises(CannotTrainError, match=r"^10 rounds in a row brought no usable reply: node 1000: .*no power"):
        Federation(make_model(), grid=spoiling(failed, lambda _, number: number >= 3)).run(strategy, 60)
    assert strategy.round.number == 12


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
def test_a_run_ends_if_fewer_nodes_are_left_than_its_method_needs(options: dict[str, Any], needed: int) -> None:
    with pytest.raises(CannotTrainError, match=f"^2 of {needed} nodes connected within 0 seconds: node "):
        Federation(make_model(), grid=Leaving).run(FedAvg(patience=0, **options), 60)


def test_one_bad_node_among_others_does_not_end_a_run_in_which_it_is_drawn_again_and_again() -> None:
    rounds, dead = LostRounds(), Refusal(8, "it failed: no power")
    bad = Refusal(7, "its array 'a' is not finite", Why.INFINITE)
    for number in range(1, 9):
        rounds.add(number, [bad, dead], 4, "")
    with pytest.raises(DivergedError):
        rounds.add(9, [Refusal(8, "the mean of BN layer 'a' is too large", Why.INFINITE)], 4, "")


@pytest.mark.parametrize(
    ("sizes", "fraction"), [(SIZES, 1.0), ((9,), 1.0), (SIZES, 0.5)], ids=["all nodes", "the only node", "two of four"]
)
def test_a_loss_that_is_not_finite_anywhere_ends_the_run_at_once(sizes: tuple[int, ...], fraction: float) -> None:
    strategy, said = FedAvg(fraction_train=fraction, **ALONE), "no node's training loss is finite; the learning rate"
    with pytest.raises(DivergedError, match=f"diverged at round 2: {said}"):
        Federation(make_model(), sizes, grid=spoiling(lost, lambda _, number: number == 2)).run(strategy, 60)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_one_nodes_infinite_loss_does_not(fraction: float) -> None:
    strategy = FedAvg(fraction_train=fraction, min_train_nodes=1)
    Federation(make_model(), grid=spoiling(lost, lambda partition, _: partition == 1)).run(strategy, 9)
    assert strategy.round.number == 9


def test_a_rate_that_is_too_long_from_the_start_is_a_divergence_too() -> None:
    with pytest.raises(
        DivergedError, match=r"diverged at round 1: no node could train \(node 1000: .*the learning rate"
    ):
        Federation(make_model(), grid=spoiling(infinite, lambda *_: True)).run(FedAvg(), 60)


def test_nodes_that_do_not_know_a_freeze_are_not_taken_for_diverging_ones() -> None:
    def mixed(message: Message, reply: Message) -> Message:
        spoil = infinite if message.metadata.dst_node_id == FIRST_NODE_ID else failed
        return spoil(message, reply)

    with pytest.raises(CannotTrainError, match="the first that asks for freeze, omit") as error:
        Federation(make_model(), grid=spoiling(mixed, lambda _, number: number >= 3)).run(FixBN(freeze_round=2), 60)
    assert not isinstance(error.value, DivergedError)


def test_the_error_survives_a_process() -> None:
    error = pickle.loads(pickle.dumps(DivergedError(46, "no node")))
    assert (str(error), error.server_round) == ("training diverged at round 46: no node", 46)
