"""What a recipe would run, and about how long: `fedbn-flwr reproduce NAME --dry-run`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fedbn_flwr.client import pick_device
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.method import Experiment, parse
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.recipes.matrix import Cell
from fedbn_flwr.experiments.resources import expected_steps, load_data, rounds_within_budget
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.strategies import CannotTrainError

#: training samples, classes, channels and side of the papers' data sets, for a plan where they are not there
SHAPES = {
    "cifar10": (50_000, 10, 3, 32),
    "cifar100": (50_000, 100, 3, 32),
    "mnist": (60_000, 10, 1, 28),
    "fashion-mnist": (60_000, 10, 1, 28),
    "fashion-domains": (60_000, 10, 3, 28),
    # 7,438 of each domain, as FedBN published them
    "digits-five": (37_190, 10, 3, 28),
    # FedBN's split into training and test data
    "office-caltech-10": (2_025, 10, 3, 256),
    "domainnet": (13_464, 10, 3, 256),
    "tiny-imagenet": (100_000, 200, 3, 64),
    "imagenet": (1_281_167, 1_000, 3, 224),
    # no stand-in has label maps: its steps are counted and not measured
    "cityscapes": (2_975, 19, 3, 768),
}
#: what is not looked for, as that would download it
REMOTE = "hf:"
#: rounds of a measurement; the first one does not count
ROUNDS = 2
#: most clients, and steps of each, of a measurement: in stacks and rounds of more steps, a step takes less time
CLIENTS, STEPS = 10, 5
#: a first measurement with two clients and one step is all there is where a step takes more seconds
SLOW = 0.05
#: classes of a measurement, at most: evaluation needs an image of each, and the last layer takes little of a step
CLASSES = 10


@dataclass(frozen=True)
class Estimate:
    """What one cell costs."""

    cell: Cell
    runs: int
    rounds: int
    #: of all clients, in all runs
    steps: int
    #: None where the step could not be measured
    seconds: float | None


def estimate(cells: Sequence[Cell], measure: bool = True) -> Iterator[Estimate]:
    """Return what each cell costs; a step is measured once for each strategy, normalizer, model, data set and batch.

    A step of a centralized method is one on a batch as large as those of all clients together.
    """
    for device in {cell.plan.experiment(cell.method, 0).config.device for cell in cells}:
        try:
            pick_device(device)
        except ValueError as error:
            raise UsageError(str(error)) from error
    measured: dict[object, float | None] = {}
    for cell in cells:
        experiment = cell.plan.experiment(cell.method, 0)
        config, runs = experiment.config, cell.plan.seeds + len(cell.plan.rates)
        samples = SHAPES.get(config.dataset, (0,))[0]
        try:
            rounds = rounds_within_budget(config, config.clients, samples).rounds
            steps = runs * expected_steps(config, samples)
        except (ValueError, OSError, RuntimeError) as error:
            raise UsageError(f"{cell.name} needs the data set {config.dataset!r}: {error}") from error
        key = (experiment.strategy, config.norm, config.model, config.dataset, config.image_size, config.batch_size)
        if key not in measured:
            measured[key] = _measured(experiment, cell.plan.engine) if measure else None
        time = measured[key]
        yield Estimate(cell, runs, rounds, steps, None if time is None else time * steps)


def missing_data(cells: Sequence[Cell]) -> list[str]:
    """Return a line about each data set that cannot be read here."""
    lines = {}
    for cell in cells:
        config = cell.plan.experiment(cell.method, 0).config
        if (key := (config.dataset, config.data_root)) in lines or config.dataset.startswith(REMOTE):
            continue
        try:
            load_data(config)
            lines[key] = ""
        except (ValueError, OSError) as error:
            lines[key] = f"data set {config.dataset!r} is not there: {error}"
    return [line for line in lines.values() if line]


def _measured(experiment: Experiment, engine: str) -> float | None:
    """Return the seconds of one client's step: first of two clients, and where that is fast of as many as train."""
    config = experiment.config
    taking_part = max(int(config.clients * config.fraction_train), 1)
    seconds = _step_seconds(experiment, engine, min(taking_part, 2), 1)
    if seconds is None or seconds > SLOW:
        return seconds
    steps = min(config.local_steps, STEPS) if config.local_steps and not config.local_epochs else STEPS
    return _step_seconds(experiment, engine, min(taking_part, CLIENTS), steps)


def _step_seconds(experiment: Experiment, engine: str, clients: int, steps: int) -> float | None:
    """Return the seconds of one client's step, from a run of a few steps on data of the same shape."""
    config = experiment.config
    dataset, samples = config.dataset, max(clients * config.batch_size, CLASSES)
    if shape := SHAPES.get(dataset):
        _, classes, channels, size = shape
        classes, size = min(classes, CLASSES), config.image_size or size
        dataset = f"synthetic:n={samples}:test={classes}:classes={classes}:size={size}:channels={channels}"
    short = replace(
        config,
        dataset=dataset,
        method=parse(config.method)[0],
        partition=config.partition if experiment.strategy_class.pooled else "iid",
        clients=clients,
        fraction_train=1.0,
        rounds=ROUNDS,
        local_steps=steps,
        local_epochs=0,
        budget_epochs=0.0,
        lr_schedule="",
        evaluate_every=ROUNDS,
        checkpoint_every=0,
    )
    options = {key: value for key, value in experiment.options.items() if key not in ("freeze_round", "m")}
    with TemporaryDirectory() as folder:
        try:
            ENGINES[engine](replace(experiment, config=short, options=options), Path(folder), None)
        except (UsageError, CannotTrainError, ValueError, RuntimeError):
            return None
        rows = read_rounds(Path(folder))
    return float(min(row["seconds"] for row in rows[1:])) / (clients * steps)
