"""Traffic as FedTAN's paper counts it: two rounds with five clients, extrapolated to a long run.

Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, tables 3 to 5, appendices G and H.
Megabytes have 2^20 bytes. What the server sends to all clients counts once. Batch counters do not count.

Table 5 is headed "GB", but holds gigabits, of 2^30 bits, over 500 iterations of the perceptron. Its models are counted
without BN statistics, unlike those of tables 3 and 4. The row of FedTAN prints the total without its exchanges.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from fedbn_flwr import state
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.resources import fresh_model
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.traffic.counting_grid import CountingGrid, Tally
from fedbn_flwr.wire import Instruction

MEGABYTE, GIGABYTE = 2**20, 2**30
CLIENTS = 5

#: images have the shapes of CIFAR-10's and MNIST's, the only property of the data that traffic depends on
IMAGES = {"resnet20": "synthetic:n=20:test=10:size=32", "mlp": "synthetic:n=20:test=10:size=28:channels=1"}


@cache
def count(method: str, rounds: int = 1, model: str = "resnet20") -> tuple[Tally, ...]:
    """Return the training traffic of each round of a short run."""
    setting = {"model": model, "dataset": IMAGES[model], "partition": "iid", "clients": CLIENTS}
    experiment = resolve({**setting, "method": method, "rounds": rounds})
    grid = CountingGrid(InProcessGrid(client_app(bound_client_fn(experiment.config)), CLIENTS))
    totals: list[Tally] = []
    experiment.make_strategy(CLIENTS).start(
        grid,
        state.to_record(fresh_model(experiment.config).state_dict()),
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
    """Return the traffic of m rounds like the first of a short run, and of the others like its second.

    BN is frozen in the second. The paper keeps sending the frozen statistics.
    """
    first, second = count(f"fedtan-ii:m=1:exchange={exchange}:send-frozen={send_frozen}", rounds=2)
    (plain,) = count("fedavg")
    exchanges = m * first.exchanges + (rounds - m) * second.exchanges
    sent = m * first.paper + (rounds - m) * second.paper
    return LongRun(
        sent / GIGABYTE, m * (first.exchanges - plain.exchanges) / exchanges, m * (first.paper - plain.paper) / sent
    )
