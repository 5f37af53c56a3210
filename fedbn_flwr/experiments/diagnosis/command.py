"""The command `diagnose`: measures what the clients' data do to the batch normalization of a model."""

from collections.abc import Sequence
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from fedbn_flwr.client import pick_device
from fedbn_flwr.client.batch_plan import BatchLoader, plan
from fedbn_flwr.client.training import Batch
from fedbn_flwr.diagnosis import Diagnosis, check, diagnose
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.diagnosis.report import plot_diagnosis, show_diagnosis
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.output.run_folder import make_folder, write_json
from fedbn_flwr.experiments.resources import check_simulation, fresh_model, load_data, make_partition, set_threads
from fedbn_flwr.plugins.options import UsageError, whole_number
from fedbn_flwr.randomness import numpy_generator, torch_generator
from fedbn_flwr.wire import Instruction, wire_key

#: largest mini-batch that is too small for statistics of its own, whatever the clients' data are (FedWon's case)
TINY_BATCH = 8
#: `excess` up to which BN is fine, and from which FixBN is not enough; docs/diagnose.md shows where they come from
SMALL_EXCESS, LARGE_EXCESS = 0.25, 0.4


def run_diagnosis(options: dict[str, Any]) -> None:
    """Diagnose on mini-batches of each client; write `diagnosis.json` and `diagnosis.png` to the results folder."""
    count = whole_number("--batches", options.pop("batches"))
    experiment = resolve(options)
    check_simulation(experiment)
    config = experiment.config
    set_threads(config)
    print(load_data(config))
    model = _model(config)
    folder = make_folder(Path(config.results_dir))
    clients = participants(config)
    draws = list(zip(*(mini_batches(config, client, count) for client in clients), strict=True))
    diagnosis = diagnose(model, draws, _weights(experiment, clients), seed=config.seed)
    advice = suggestion(diagnosis, count_domains(config, clients))
    content = {"options": experiment.to_mapping(), "batches": count, "clients": clients, "suggestion": advice}
    content |= asdict(diagnosis, dict_factory=lambda items: {wire_key(key): value for key, value in items})
    write_json(folder / "diagnosis.json", content)
    title = f"{config.dataset}, {config.model}, {config.partition}, {len(clients)} clients"
    plot_diagnosis(diagnosis, folder / "diagnosis.png", title)
    show_diagnosis(diagnosis, title, advice, folder)


def _model(config: Config) -> nn.Module:
    """Build the model in float64, where FedTAN's error is 0: in float32 rounding turns some ReLUs."""
    model = fresh_model(config).to(pick_device(config.device), torch.float64).train()
    try:
        check(model)
    except ValueError as error:
        raise UsageError(f"cannot diagnose {config.model} with norm {config.norm!r}: {error}") from error
    return model


def _weights(experiment: Experiment, clients: Sequence[int]) -> list[float]:
    if experiment.options.get("weighting") == "uniform":
        return [1.0] * len(clients)
    partition = make_partition(experiment.config, experiment.config.clients)
    return [float(len(partition[client])) for client in clients]


def participants(config: Config) -> list[int]:
    """Return the clients of one round: all, or a share of them drawn by the seed."""
    number = max(int(config.clients * config.fraction_train), 1)
    chosen = numpy_generator(config.seed, "diagnosis", "clients").choice(config.clients, number, replace=False)
    return sorted(chosen.tolist())


def mini_batches(config: Config, client: int, count: int) -> list[Batch]:
    """Return the first mini-batches that a client would train on, in float64."""
    split, device = load_data(config).train, pick_device(config.device)
    indices = torch.from_numpy(make_partition(config, config.clients)[client])
    instruction = Instruction(local_steps=count, batch_size=config.batch_size, replacement=config.replacement)
    generator = torch_generator(config.seed, "diagnosis", "batches", client)
    batches = plan(len(indices), instruction, generator, merge_single=True)
    loader = BatchLoader(split, device, config.augmentation, indices[batches.positions], batches.sizes, generator)
    return [(inputs if split.has_ids else inputs.double(), targets) for inputs, targets in loader]


def count_domains(config: Config, clients: Sequence[int]) -> int:
    """Return how many domains the clients have if each client has exactly one; else 0."""
    domains, parts = load_data(config).train.domains, make_partition(config, config.clients)
    own = [set() if domains is None else set(domains[torch.from_numpy(parts[client])].tolist()) for client in clients]
    return len(set.union(*own)) if all(len(each) == 1 for each in own) else 0


def excess(diagnosis: Diagnosis) -> float:
    """Return what the clients' differences add to the error of FedAvg with BN: squares of errors add up."""
    actual, chance = diagnosis.actual.errors["nothing"], diagnosis.shuffled.errors["nothing"]
    return sqrt(max(actual**2 - chance**2, 0.0))


def suggestion(diagnosis: Diagnosis, domains: int = 0) -> str:
    """Return one line of advice; a rule of thumb, not a promise. `domains` is as in `count_domains`."""
    size, error = median(diagnosis.batch_sizes), excess(diagnosis)
    if size <= TINY_BATCH:
        return (
            f"Mini-batches of {size:g} samples are too small for statistics of their own. This suggests a model that "
            "needs none: GN (fedavg+gn) or FedWon (fedwon)."
        )
    reason = f"Clients' differences put the mean gradient off by {error:.0%} of its size, beyond chance."
    if error < SMALL_EXCESS:
        return f"{reason} This suggests that BN is fine as it is (fedavg)."
    if domains > 1:
        return (
            f"{reason} Each client has one of {domains} domains. This suggests a model for each client (fedbn, or "
            "standalone if clients have many samples) or BN for each domain (fednorm); for one model FedWon (fedwon)."
        )
    if error < LARGE_EXCESS:
        return f"{reason} This suggests FixBN (fixbn), which costs no further communication."
    return (
        f"{reason} This suggests FedTAN (fedtan), or where exchanges are slow fedtan:carry=true or fedtan-ii; FedWon "
        "(fedwon) if the model may change; at the least FixBN (fixbn)."
    )
