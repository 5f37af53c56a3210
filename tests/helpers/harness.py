"""A small federation in float64, for comparing strategies with slow references."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.clientapp.mods import Mod
from fedbn_flwr.data import Split
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid, RunConfig
from fedbn_flwr.strategies import BaseStrategy
from fedbn_flwr.wire import Instruction

CLASSES = 3
#: unequal on purpose
SIZES = (7, 12, 20, 5)
#: options of a strategy that is content with one node
ALONE: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


class Double(nn.Module):
    """A model in float64 that takes float32 inputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.net(inputs.double())
        return result


def perceptron(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return two linear layers, with BN and dropout between them."""
    inputs = nn.Flatten(), nn.Linear(in_channels * image_size**2, 12)
    return Double(
        nn.Sequential(
            *inputs, nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, num_classes)
        )
    )


def convolutions(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return two convolutions with BN, and a linear layer."""
    first = nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()
    head = nn.Flatten(), nn.Linear(6 * ((image_size + 1) // 2) ** 2, num_classes)
    return Double(nn.Sequential(*first, *second, *head))


def make_split(sizes: Sequence[int] = SIZES, seed: int = 0) -> Split:
    """Return one split of all clients' samples.

    Clients have different means, and the domain is the client.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    inputs = (
        torch.randn(len(owners), 1, 4, 4, generator=generator) + 0.5 * owners[:, None, None, None]
    )
    labels = torch.randint(CLASSES, (len(owners),), generator=generator)
    return Split(inputs, labels, domains=owners)


def seed_weights(seed: int) -> None:
    """Seed the generator of new layers alone: `torch.manual_seed` writes down the caller's stack for
    each device that has not been started, which takes as long as the layers.
    """
    torch.default_generator.manual_seed(seed)


def make_model(kind: str = "bn", seed: int = 0, **options: Any) -> nn.Module:
    """Return two convolutions with a normalizer each, and a linear layer."""
    with torch.random.fork_rng():
        seed_weights(seed)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )
        return Double(norm.replace(net, kind, **options))


def make_float32_model(kind: str = "bn") -> nn.Module:
    """Return a model with two BN layers, "1" and "4", whose numbers are float32."""
    with torch.random.fork_rng():
        seed_weights(0)
        net = nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.Conv2d(2, 2, 2),
            nn.BatchNorm2d(2),
            nn.Flatten(),
            nn.Linear(2, CLASSES),
        )
        return norm.replace(net, kind)


def parts(sizes: Sequence[int] = SIZES) -> list[np.ndarray]:
    """Return the indices of every client's samples."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


ClientWrapper = Callable[[BNClient, int], BNClient]


class Federation:
    """A federation of clients in this process."""

    def __init__(
        self,
        model: nn.Module,
        sizes: Sequence[int] = SIZES,
        wrap: ClientWrapper = lambda client, _: client,
        grid: type[InProcessGrid] = InProcessGrid,
        mods: list[Mod] | None = None,
        device: str = "cpu",
    ) -> None:
        self.model, self.split, self.parts = model, make_split(sizes), parts(sizes)
        self.initial = state.to_record(model.state_dict())
        self._wrap, self._device = wrap, device
        self.grid = grid(client_app(self.client, mods), len(sizes))

    def client(self, context: Context) -> BNClient:
        index = int(context.node_config["partition-id"])
        client = BNClient(
            self.model,
            self.split,
            test=self.split,
            num_classes=CLASSES,
            indices=self.parts[index],
            partition_id=index,
            memory=context.state,
            device=self._device,
        )
        return self._wrap(client, index)

    def run(
        self,
        strategy: BaseStrategy,
        rounds: int = 3,
        grid: Grid | None = None,
        evaluate_every: int = 0,
        **instruction: Any,
    ) -> state.State:
        """Train, and return the final global state.

        `instruction` overrides options of `INSTRUCTION`.

        Nodes evaluate after the last round only, unless told otherwise: to evaluate takes as long
        as to train.
        """
        if strategy.evaluate_every == 1:
            strategy.evaluate_every = evaluate_every or rounds
        asked = replace(INSTRUCTION, **instruction)
        seen: list[ArrayRecord] = []
        strategy.start(
            grid or self.grid,
            self.initial,
            rounds,
            train_config=asked.to_config(always=("lr",)),
            evaluate_config=ConfigRecord({"seed": asked.seed}),
            evaluate_fn=lambda _, arrays: seen.append(arrays),
        )
        return state.from_record(seen[-1])

    def kept(self, partition: int, name: str = wire.STAYS) -> state.State:
        """Return the arrays that a node has kept under a name; without entries if there are
        none.
        """
        contexts = (self.grid.context(node) for node in self.grid.get_node_ids())
        (memory,) = (
            Memory(each.state) for each in contexts if each.node_config["partition-id"] == partition
        )
        return memory.recall(name)


INSTRUCTION = Instruction(local_steps=3, batch_size=4, lr=0.1, seed=5)


class Backwards(InProcessGrid):
    """A grid whose node ids run against the partitions, and whose replies come back to front."""

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: RunConfig | None = None
    ) -> None:
        super().__init__(client_app, num_nodes, run_config)
        self._nodes = range(7_000, 7_000 - 13 * num_nodes, -13)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return list(super().pull_messages(message_ids))[::-1]


class Traffic(InProcessGrid):
    """A grid that keeps all messages, and all replies."""

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: RunConfig | None = None
    ) -> None:
        super().__init__(client_app, num_nodes, run_config)
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.replies += replies
        return replies


def participants(strategy: BaseStrategy) -> list[list[int]]:
    """Return a list that gets the partitions that each round draws."""
    aggregate, rounds = strategy.aggregate_train, list[list[int]]()

    def noting(server_round: int, replies: Iterable[Message]) -> Any:
        result = aggregate(server_round, replies)
        rounds.append([node - FIRST_NODE_ID for node in strategy.round.nodes])
        return result

    strategy.aggregate_train = noting  # type: ignore[method-assign]
    return rounds


def assert_all_differ(states: Iterable[state.State], by: float) -> None:
    """Check that no two of the states are closer than `by`."""
    assert all(distance(one, other) > by for one, other in combinations(states, 2))


def distance(one: state.State, other: state.State) -> float:
    """Return the largest difference between two states, relative to the larger of 1 and the
    value.
    """
    assert one.keys() == other.keys()
    largest = 0.0
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        value, too = value.double(), other[name].double()
        assert torch.equal(value.isnan(), too.isnan()), name
        gap = ((value - too).abs() / value.abs().clamp(min=1)).nan_to_num()
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
    return largest
