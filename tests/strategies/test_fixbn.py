"""What FixBN announces before its freeze, and the learning rate from the freeze on, also of FedTAN-II."""

import math
from typing import Any

import pytest

from fedbn_flwr.server.base_strategy import Round
from fedbn_flwr.strategies import FedTANII, FixBN
from fedbn_flwr.wire import Instruction


def test_a_client_that_could_not_freeze_is_known_before_the_freeze() -> None:
    strategy = FixBN(freeze_round=3)
    assert [strategy.instruct(Instruction(server_round=number)).later for number in (3, 4)] == ["freeze,omit", ""]


FROZEN_RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "a fifth from the freeze on": ({}, [0.1, 0.1, 0.02, 0.02, 0.02]),
    "another share": ({"frozen_lr": 0.5}, [0.1, 0.1, 0.05, 0.05, 0.05]),
    "no more learning": ({"frozen_lr": 0.0}, [0.1, 0.1, 0.0, 0.0, 0.0]),
    "no bound": ({"frozen_lr": 1.0}, [0.1] * 5),
    "lower where the schedule is": ({"lr_schedule": "0.5@3,0.1@4"}, [0.1, 0.1, 0.02, 0.02, 0.005]),
    "not lower than a schedule that is low enough": ({"lr_schedule": "0.1@2"}, [0.1, 0.1, 0.01, 0.01, 0.01]),
    "what the schedule says of the freeze": ({"lr_schedule": "=0.09@freeze,0.5@4"}, [0.1, 0.1, 0.09, 0.09, 0.045]),
    "a schedule that raises the rate at the freeze": ({"lr_schedule": "=0.3@freeze"}, [0.1, 0.1, 0.3, 0.3, 0.3]),
    "a cosine, lower than the bound at last": (
        {"lr_schedule": "warmup@1,cosine@1"},
        [0.1, 0.1, 0.02, 0.02, 0.1 * (1 + math.cos(0.75 * math.pi)) / 2],
    ),
    "a cosine from the freeze on": ({"lr_schedule": "=0.3@freeze,cosine@3"}, [0.1, 0.1, 0.3, 0.3, 0.15]),
    "statistics that move": ({"freeze": "affine"}, [0.1] * 5),
    "statistics and affine parameters that stand still": ({"freeze": "both"}, [0.1, 0.1, 0.02, 0.02, 0.02]),
}


@pytest.mark.parametrize("case", FROZEN_RATES)
@pytest.mark.parametrize("make", [lambda **options: FixBN(freeze_round=2, **options), lambda **o: FedTANII(m=2, **o)])
def test_the_rate_under_frozen_statistics(case: str, make: Any) -> None:
    options, wanted = FROZEN_RATES[case]
    strategy = make(**options)
    strategy.num_rounds = 5
    rates = [strategy.instruct(Instruction(server_round=number, lr=0.1)).lr for number in range(1, 6)]
    assert rates == pytest.approx(wanted)


def test_a_loop_that_has_a_rate_of_its_own_gets_none_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FixBN(freeze_round=2, frozen_lr=0.5)
    strategy.round = Round(has_rate=False)
    usual = Instruction().lr
    assert [strategy.instruct(Instruction(server_round=number)).lr for number in range(1, 5)] == [usual] * 4
    assert ["has no `lr`" in message for message in caplog.messages] == [True]
