"""The cases of the benchmark: models, methods and numbers of clients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fedbn_flwr.experiments.experiment import Experiment, resolve

#: with the side of its images, where these are not of 8 x 8 pixels
MODELS = ("small-cnn", "resnet20")
METHODS = ("fedavg", "fixbn:freeze-round=1", "fedtan:carry=true", "fedtan", "fedtan:exchange=paper")
CLIENTS = (10, 100, 1_000)
LOCAL_STEPS, BATCH_SIZE = 5, 20
#: also measured with one local step, and few clients: most of their round is not training
SHORT_METHODS, SHORT_CLIENTS = ("fedavg", "fedtan"), 10
#: the most clients that real data are enough for; above that, as many samples a client as a batch
#: has
MOST_ON_DIGITS = 10
#: the models of `jax_round.py`
IN_JAX = ("small-cnn", "resnet20")
#: FixBN's round of the freeze, from which on it is timed
FREEZE_ROUND = 1
#: a precision, and further options of a run
Variant = tuple[str, tuple[tuple[str, str], ...]]
DEFAULT: Variant = ("float32", ())
#: as fast as a GPU can
FASTEST: Variant = ("tf32", (("deterministic", "false"),))
#: more rounds than anybody waits for: the driver says when a case ends
ENDLESS = 10**9
#: the rounds of the run that a case stands for: the stacked engine starts worker processes in long
#: runs
RUN = 1_000


@dataclass(frozen=True)
class Case:
    """One case, at which every engine is timed: a group of bars in the picture."""

    model: str
    method: str
    clients: int
    local_steps: int = LOCAL_STEPS
    batch_size: int = BATCH_SIZE
    device: str = "auto"
    threads: int = 1
    workers: int = 0
    #: side of an image; those of more than 8 x 8 pixels have three channels
    size: int = 8
    precision: str = "float32"
    #: further options of the run, by their keys
    options: tuple[tuple[str, str], ...] = ()

    @property
    def arithmetic(self) -> str:
        """The precision, and what else changes how a device computes."""
        return ", ".join([self.precision, *map("=".join, self.options)])

    @property
    def dataset(self) -> str:
        """The digits; for more clients synthetic images of the same size, and for larger images."""
        if self.size > 8:
            return f"synthetic:n={self.clients * BATCH_SIZE}:size={self.size}"
        if self.clients <= MOST_ON_DIGITS:
            return "digits"
        return f"synthetic:n={self.clients * BATCH_SIZE}:channels=1"

    @property
    def freezes(self) -> bool:
        """Whether BN is frozen in the rounds that count."""
        return self.method.startswith("fixbn")

    @property
    def layerwise(self) -> bool:
        """Whether clients wait for each other at every BN layer."""
        return self.method.startswith("fedtan") and "carry" not in self.method

    @property
    def is_plain(self) -> bool:
        """Whether loops without a framework have a counterpart that differs in nothing."""
        return self.method == "fedavg" and ("captured", "never") not in self.options

    @property
    def warm_up(self) -> int:
        """The rounds before those that count."""
        return FREEZE_ROUND + 1 if self.freezes else 1

    def experiment(self) -> Experiment:
        """The case with every option resolved."""
        options: dict[str, Any] = {
            "model": self.model,
            "method": self.method,
            "clients": self.clients,
            "local-steps": self.local_steps,
            "batch-size": self.batch_size,
            "device": self.device,
            "threads": self.threads,
            "workers": self.workers,
            "precision": self.precision,
            "dataset": self.dataset,
            "partition": "iid",
            "lr": 0.01,
            "lr-schedule": "",
            "rounds": RUN,
            **dict(self.options),
        }
        return resolve(options)


def sized(model: str) -> tuple[str, int]:
    """Return the name and the side of the images in words like `resnet20:32`."""
    name, _, size = model.partition(":")
    return name, int(size or 8)


def make_cases(
    models: Sequence[str],
    methods: Sequence[str],
    clients: Sequence[int],
    device: str,
    short_methods: Sequence[str] = SHORT_METHODS,
    variants: Sequence[Variant] = (DEFAULT,),
) -> list[Case]:
    """Return every combination, few clients first, and one local step for these.

    Cases that can share a process, of one model, number of clients and variant, come together.
    """
    cases: list[Case] = []
    for count, (model, size), (precision, options) in product(
        clients, map(sized, models), variants
    ):
        shared: dict[str, Any] = {
            "device": device,
            "size": size,
            "precision": precision,
            "options": options,
        }
        usual = [Case(model, method, count, **shared) for method in methods]
        cases += usual
        if count == SHORT_CLIENTS:
            cases += [
                replace(case, local_steps=1) for case in usual if case.method in short_methods
            ]
    return cases
