"""Where FedAvg and FedProx settle on quadratic clients, from a line of algebra."""

from typing import Any

import numpy as np
import pytest

from fedbn_flwr.strategies import FedAvg, FedProx
from tests.helpers.quadratic import Quadratics

LR, STEPS, SIZES = 0.1, 5, (1, 2, 3, 4, 10)


@pytest.mark.parametrize(("mu", "weighting"), [(0.0, "examples"), (0.5, "uniform"), (3.0, "examples")])
def test_settles_where_the_local_ends_average_to_the_start(mu: float, weighting: Any) -> None:
    """FedAvg is biased to flat clients' disadvantage, and a proximal term takes some of that away.

    K steps y <- y - lr (A (y - B) + mu (y - x)) from x end at x + (1 - (1 - lr (A + mu))^K) A / (A + mu) (B - x).
    The mean of the ends is x where x is the mean of the B_i under p_i times that factor, and not under p_i A_i.
    """
    clients = Quadratics.draw(SIZES)
    shares = np.array(SIZES) / sum(SIZES) if weighting == "examples" else np.full(len(SIZES), 1 / len(SIZES))
    curvature, minimum = np.array(clients.clients()).T
    pull = (1 - (1 - LR * (curvature + mu)) ** STEPS) * curvature / (curvature + mu)
    expected = float(np.average(minimum, weights=shares * pull))
    strategy = FedProx(mu=mu, weighting=weighting, fraction_evaluate=0.0)
    ends = clients.settle(strategy, 60, lr=LR, local_steps=STEPS)
    assert ends[-1] == pytest.approx(expected, abs=1e-7)
    assert abs(ends[-1] - clients.optimum(list(shares))) > 0.05  # the known bias
    if mu == 0:
        plain = clients.settle(FedAvg(weighting=weighting, fraction_evaluate=0.0), 60, lr=LR, local_steps=STEPS)
        assert plain[-1] == ends[-1]


def test_one_local_step_has_no_bias() -> None:
    clients = Quadratics.draw(SIZES)
    ends = clients.settle(FedAvg(fraction_evaluate=0.0), 100, lr=LR, local_steps=1)
    assert ends[-1] == pytest.approx(clients.optimum([size / sum(SIZES) for size in SIZES]), abs=1e-5)
