"""The communication tables of FedTAN's paper, counted from what two rounds of five clients send.

Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, tables 3 to 5,
appendices G and H. Megabytes have 2^20 bytes. What the server sends to all clients counts once.
Batch counters do not count.

Table 5 is headed "GB", but holds gigabits, of 2^30 bits, over 500 iterations of the perceptron. Its
models are counted without BN statistics, unlike those of tables 3 and 4. The row of FedTAN prints
the total without its exchanges.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest

from fedbn_flwr import state
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.experiment import resolve
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.transports.counting_grid import CountingGrid, Traffic
from fedbn_flwr.wire import Instruction

MEGABYTE, GIGABYTE = 2**20, 2**30
CLIENTS = 5

#: images have the shapes of CIFAR-10's and MNIST's, the only property of the data that traffic
#: depends on
IMAGES = {
    "resnet20": "synthetic:n=20:test=10:size=32",
    "mlp": "synthetic:n=20:test=10:size=28:channels=1",
}
#: parameters of ResNet-20, and its BN statistics (appendix G): 2 x (16 x 7 + 32 x 6 + 64 x 6)
PARAMETERS, STATISTICS = 269_722, 2 * (16 * 7 + 32 * 6 + 64 * 6)
#: once to all clients, once from each, in float32
COPIES = 4 * (1 + CLIENTS)


@cache
def count(method: str, rounds: int = 1, model: str = "resnet20") -> tuple[Traffic, ...]:
    """Return the training traffic of each round of a short run."""
    setting = {"model": model, "dataset": IMAGES[model], "partition": "iid", "clients": CLIENTS}
    experiment = resolve({**setting, "method": method, "rounds": rounds})
    grid = CountingGrid(InProcessGrid(client_app(bound_client_fn(experiment.config)), CLIENTS))
    totals: list[Traffic] = []
    experiment.make_strategy(CLIENTS).start(
        grid,
        state.to_record(Material.of(experiment.config).model.state_dict()),
        rounds,
        train_config=Instruction(local_steps=1, batch_size=2).to_config(always=("lr",)),
        # called before the first round and after every round
        evaluate_fn=lambda *_: totals.append(grid.training.copy()),
    )
    return tuple(after - before for before, after in pairwise(totals))


@dataclass(frozen=True)
class LongRun:
    """Traffic of a run of FedTAN-II; the `extra` shares of it are due to layer-wise exchanges."""

    gigabytes: float
    extra_exchanges: float
    extra_bytes: float


def fedtan_ii(m: int, rounds: int, exchange: str = "paper", send_frozen: bool = True) -> LongRun:
    """Return the traffic of m rounds like the first of a short run, and of the others like its
    second.

    BN is frozen in the second. The paper keeps sending the frozen statistics.
    """
    first, second = count(f"fedtan-ii:m=1:exchange={exchange}:send-frozen={send_frozen}", rounds=2)
    (plain,) = count("fedavg")
    exchanges = m * first.exchanges + (rounds - m) * second.exchanges
    sent = m * first.paper + (rounds - m) * second.paper
    return LongRun(
        sent / GIGABYTE,
        m * (first.exchanges - plain.exchanges) / exchanges,
        m * (first.paper - plain.paper) / sent,
    )


@pytest.mark.parametrize(
    ("method", "exchanges", "numbers", "printed"),
    [
        ("fedavg+gn", 1, PARAMETERS, 6.1734),
        ("fedavg", 1, PARAMETERS + STATISTICS, 6.2049),
        ("fedtan:exchange=paper", 58, PARAMETERS + 3 * STATISTICS, 6.2679),
        ("fedtan", 39, PARAMETERS + 3 * STATISTICS, 6.2679),
        ("feddna:exchange=paper", 39, PARAMETERS + 2 * STATISTICS, None),
        ("feddna", 20, PARAMETERS + 2 * STATISTICS, None),
    ],
)
@pytest.mark.sampled(2)
def test_table_3(method: str, exchanges: int, numbers: int, printed: float | None) -> None:
    [tally] = count(method)
    assert (tally.exchanges, tally.paper) == (exchanges, numbers * COPIES)
    assert printed is None or round(tally.paper / MEGABYTE, 4) == printed
    # what is really sent goes to each client by itself, with 19 batch counters of 8 bytes
    counters = 0 if "gn" in method else 19 * 8
    assert tally.payload == 2 * CLIENTS * (4 * numbers + counters)


@pytest.mark.parametrize(
    ("m", "gigabytes", "extra_exchanges", "extra_bytes"),
    [
        (1_000, 60.6563, 0.8507, 0.001014),
        (2_000, 60.7178, 0.9194, 0.002027),
        (4_000, 60.8408, 0.9580, 0.004045),
        (10_000, 61.2100, 0.9828, 0.010051),
    ],
)
def test_table_4(m: int, gigabytes: float, extra_exchanges: float, extra_bytes: float) -> None:
    run = fedtan_ii(m, 10_000)
    assert round(run.extra_exchanges, 4) == extra_exchanges
    # the paper computes with megabytes of four decimals
    assert run.gigabytes == pytest.approx(gigabytes, abs=5e-4)
    assert run.extra_bytes == pytest.approx(extra_bytes, abs=5e-6)


@pytest.mark.parametrize(
    ("m", "gigabits", "extra_exchanges", "extra_bits"),
    [
        (10, 2.1388, 0.0566, 0.000100),
        (50, 2.1397, 0.2308, 0.000501),
        (100, 2.1408, 0.3750, 0.001002),
        # FedTAN itself; the paper prints 2.1386, the total of no exchange, but the right share of
        # 2.1493
        (500, 2.1493, 0.7500, 0.004992),
    ],
)
def test_table_5(m: int, gigabits: float, extra_exchanges: float, extra_bits: float) -> None:
    """The column is headed "Exchanged bits (GB)" and holds 2^30 bits, so that its gigabytes are an
    eighth.
    """
    iterations = 500
    # BN's parameters are there, its statistics are not counted: the same numbers as with GN
    (base,) = count("fedavg+gn", model="mlp")
    assert base.paper == (784 * 30 + 30 + 2 * 30 + 30 * 10 + 10) * COPIES
    (fedavg,), (fedtan,) = count("fedavg", model="mlp"), count("fedtan:exchange=paper", model="mlp")
    extra, messages = fedtan.paper - fedavg.paper, fedtan.exchanges - fedavg.exchanges
    assert (extra, messages) == (2 * 2 * 30 * COPIES, 3)
    total = iterations * base.paper + m * extra
    assert round(8 * total / 2**30, 4) == gigabits
    assert round(8 * iterations * base.paper / 2**30, 4) == 2.1386
    assert round(m * messages / (iterations + m * messages), 4) == extra_exchanges
    assert m * extra / total == pytest.approx(extra_bits, abs=5e-7)


def test_leaner_than_the_paper() -> None:
    """Frozen statistics that clients do not send, and fused exchanges."""
    paper, lean, fused = (
        fedtan_ii(1_000, 10_000),
        fedtan_ii(1_000, 10_000, send_frozen=False),
        fedtan_ii(1_000, 10_000, exchange="fused", send_frozen=False),
    )
    saved = 9_000 * 4 * CLIENTS * STATISTICS
    assert (paper.gigabytes - lean.gigabytes) * 2**30 == pytest.approx(saved)
    # FedTAN's exchanges, of table 3, in the rounds before the freeze
    extra = 1_000 * 2 * STATISTICS * COPIES
    assert lean.extra_bytes == pytest.approx(
        extra / (10_000 * (PARAMETERS + STATISTICS) * COPIES + extra - saved)
    )
    assert lean.extra_exchanges == paper.extra_exchanges
    assert round(fused.extra_exchanges, 4) == round(38_000 / 48_000, 4)
