"""FixBN's two stages: what clients are asked for in each, and the defaults."""

import pytest

from fedbn_flwr.strategies import FixBN, Privacy
from fedbn_flwr.wire import Instruction


def test_the_defaults() -> None:
    strategy = FixBN()
    assert (strategy.window, strategy.threshold, strategy.send_frozen) == (10, 1.0, False)


@pytest.mark.parametrize(
    ("freeze", "send_frozen", "omit"),
    [
        ("statistics", False, "statistics"),
        ("affine", False, "affine"),
        ("both", False, "bn"),
        ("both", True, "none"),
    ],
)
def test_what_stands_still_is_not_sent_unless_that_is_asked_for(freeze: str, send_frozen: bool, omit: str) -> None:
    strategy = FixBN(freeze_round=3, freeze=freeze, send_frozen=send_frozen)  # type: ignore[arg-type]
    before, after = (strategy.instruct(Instruction(server_round=number)) for number in (3, 4))
    assert (before.freeze, before.omit) == ("none", "none")
    assert (after.freeze, after.omit) == (freeze, omit)


def test_a_client_that_could_not_freeze_is_known_before_the_freeze() -> None:
    strategy = FixBN(freeze_round=3)
    assert [strategy.instruct(Instruction(server_round=number)).later for number in (3, 4)] == ["freeze,omit", ""]


def test_frozen_entries_are_sent_without_privacy_only() -> None:
    FixBN(send_frozen=True)
    FixBN(privacy=Privacy(1.0, 1.0), weighting="uniform")
    with pytest.raises(ValueError, match="send_frozen must be False"):
        FixBN(privacy=Privacy(1.0, 1.0), weighting="uniform", send_frozen=True)
