"""The command `diagnose`: measures what the clients' data do to the batch normalization of a
model.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import isnan, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch
from rich.progress import track
from torch import nn

from fedbn_flwr.client.batch_plan import BatchLoader, batch_sizes, draw_batches
from fedbn_flwr.client.image_order import channels_last
from fedbn_flwr.data.splits import Batch
from fedbn_flwr.diagnosis import Diagnosis, Measurement, check_model, diagnose, overall
from fedbn_flwr.experiments.checks import check_simulation
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.experiment import resolve
from fedbn_flwr.experiments.material import Material, set_up_process
from fedbn_flwr.experiments.output.console import console, new_table, say
from fedbn_flwr.experiments.output.run_folder import make_folder, write_json
from fedbn_flwr.plugins.options import refusing, whole_number
from fedbn_flwr.randomness import numpy_generator, torch_generator
from fedbn_flwr.wire import Instruction, wire_key

DISTANCES = {"mean": "means", "variance": "variances", "gradients": "gradients by them"}
#: by what clients share: the values that are each client's own, and the method
MISMATCHES = {
    "nothing": "statistics and their gradients (FedAvg with BN)",
    "gradients": "statistics",
    "statistics": "gradients by the statistics (FedDNA)",
    "both": "nothing (FedTAN)",
}
#: rows of the second table, from what a measurement has for each client
SPREADS = {"gradient deviation B": "deviation", "heterogeneity V": "heterogeneity"}
#: largest mini-batch that is too small for statistics of its own, whatever the clients' data are
#: (FedWon's case)
TINY_BATCH = 8
#: local steps of which FedTAN, which corrects the first, corrects too few
MANY_STEPS = 20
#: `excess` up to which BN is fine; docs/diagnose.md shows where it comes from
SMALL_EXCESS = 0.4
#: what is suggested for a model that begins with weights, which other layers would throw away
AS_TRAINED = "BN as it was trained (fedavg:freeze-bn=true) at a lower learning rate"
#: and before it where clients differ by their targets, and the last layer can be solved
HEAD = "the last layer in closed form (fed3r), in one exchange, or "


def show_diagnosis(diagnosis: Diagnosis, title: str, advice: str, folder: Path) -> None:
    """Print distances by layer, errors by mismatch, and the suggestion."""
    actual = diagnosis.actual
    shuffled = diagnosis.shuffled
    table = new_table(
        f"{title}: clients' distance from the global values",
        "BN layer",
        numbers=[*DISTANCES.values()],
    )
    table.columns[0].no_wrap = True  # a name in two could not be copied
    for layer, by_chance in zip(actual.layers, shuffled.layers, strict=True):
        cells = (
            _both(_overall(diagnosis, layer, what), _overall(diagnosis, by_chance, what))
            for what in DISTANCES
        )
        table.add_row(layer.name, *cells)
    console.print(table)
    table = new_table(
        "the mean gradient, relative to its size", "what is each client's own", numbers=["error"]
    )
    for shared, unshared in MISMATCHES.items():
        table.add_row(unshared, _both(actual.errors[shared], shuffled.errors[shared]))
    table.add_section()
    for label, what in SPREADS.items():
        table.add_row(
            label, _both(_relative(diagnosis, actual, what), _relative(diagnosis, shuffled, what))
        )
    console.print(table)
    console.print(
        "In brackets: with the same samples dealt out at random, which is what chance alone does."
    )
    console.print(advice)
    say([f"Results: {folder.resolve()} (diagnosis.json)"])


def _overall(diagnosis: Diagnosis, layer: Any, what: str) -> float:
    values: Sequence[float] = getattr(layer, what)
    if values:
        return overall(diagnosis.weights, values)
    return float("nan")


def _relative(diagnosis: Diagnosis, measurement: Measurement, what: str) -> float:
    value = overall(diagnosis.weights, getattr(measurement, what))
    if measurement.gradient_norm:
        return value / measurement.gradient_norm
    return float("nan")


def _both(actual: float, chance: float) -> str:
    if isnan(actual):
        return "-"
    return f"{actual:.3f} ({chance:.3f})"


def run_diagnosis(options: dict[str, Any]) -> None:
    """Diagnose on mini-batches of each client; write `diagnosis.json` to the results folder."""
    count = whole_number("--batches", options.pop("batches"))
    experiment = resolve(options)
    material, _ = check_simulation(experiment)
    config = material.config
    set_up_process(config.engine)
    print(material.data)
    model = _model(material)
    folder = make_folder(Path(config.results.results_dir))
    clients = participants(config)
    draws = list(zip(*(mini_batches(material, client, count) for client in clients), strict=True))
    weights = [
        1.0 if experiment.options.get("weighting") == "uniform" else len(material.partition[client])
        for client in clients
    ]
    bar = partial(
        track,
        description="mini-batches",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    diagnosis = diagnose(
        model,
        draws,
        weights,
        loss_function=material.task.loss,
        seed=config.seed,
        progress=bar,
    )
    advice = suggestion(
        diagnosis,
        count_domains(material, clients),
        config.training.local_steps,
        bool(config.model.init_from),
        can_solve=not material.task.placed,
    )
    content = {
        "options": experiment.to_mapping(),
        "batches": count,
        "clients": clients,
        "suggestion": advice,
    }
    content |= asdict(
        diagnosis, dict_factory=lambda items: {wire_key(key): value for key, value in items}
    )
    write_json(folder / "diagnosis.json", content)
    title = (
        f"{config.data.dataset}, {config.model.model}, {config.data.partition}, "
        f"{len(clients)} clients"
    )
    show_diagnosis(diagnosis, title, advice, folder)


def _model(material: Material) -> nn.Module:
    config = material.config
    model = material.model.to(material.device).train()
    with refusing(f"cannot diagnose {config.model.model} with norm {config.model.norm!r}: "):
        check_model(model)
    return model


def participants(config: Config) -> list[int]:
    """Return the clients of one round: all, or a share of them drawn by the seed."""
    generator = numpy_generator(config.seed, "diagnosis", "clients")
    chosen = generator.choice(config.clients, config.clients_in_round(), replace=False)
    return sorted(chosen.tolist())


def mini_batches(material: Material, client: int, count: int) -> list[Batch]:
    """Return the first mini-batches that a client would train on."""
    config = material.config
    split = material.data.train
    indices = torch.from_numpy(material.partition[client])
    instruction = Instruction(
        local_steps=count,
        batch_size=config.training.batch_size,
        replacement=config.training.replacement,
    )
    generator = torch_generator(config.seed, "diagnosis", "batches", client)
    sizes = batch_sizes(len(indices), instruction, merge_single=True)
    drawn = draw_batches(len(indices), sizes, instruction.replacement, generator)
    loader = BatchLoader(
        split, material.device, config.training.augmentation, indices[drawn], sizes, generator
    )
    return [(channels_last(inputs, material.model), targets) for inputs, targets in loader]


def count_domains(material: Material, clients: Sequence[int]) -> int:
    """Return how many domains the clients have if each client has exactly one; else 0."""
    domains = material.data.train.domains
    parts = material.partition
    own = [
        set() if domains is None else set(domains[torch.from_numpy(parts[client])].tolist())
        for client in clients
    ]
    if all(len(each) == 1 for each in own):
        return len(set.union(*own))
    return 0


def excess(diagnosis: Diagnosis) -> float:
    """Return what the clients' differences add to the error of FedAvg with BN: squares of errors
    add up.
    """
    actual = diagnosis.actual.errors["nothing"]
    chance = diagnosis.shuffled.errors["nothing"]
    return sqrt(max(actual**2 - chance**2, 0.0))


def is_certain(diagnosis: Diagnosis) -> bool:
    """Return whether the threshold is more than 2 standard errors away, by how much the
    mini-batches differ.
    """
    pairs = zip(diagnosis.actual.by_draw, diagnosis.shuffled.by_draw, strict=True)
    squares = [actual**2 - chance**2 for actual, chance in pairs]
    distance = abs(excess(diagnosis) ** 2 - SMALL_EXCESS**2)
    return len(squares) > 1 and distance > 2 * stdev(squares) / sqrt(len(squares))


def suggestion(
    diagnosis: Diagnosis,
    domains: int = 0,
    local_steps: int = 5,
    is_trained: bool = False,
    can_solve: bool = True,
) -> str:
    """Return one line of advice; a rule of thumb, not a promise.

    `domains` is as in `count_domains`, and `can_solve` tells whether the last layer has a closed
    form.
    """
    size = median(diagnosis.batch_sizes)
    error = excess(diagnosis)
    as_trained = AS_TRAINED
    if can_solve and domains < 2:
        as_trained = HEAD + AS_TRAINED
    if size <= TINY_BATCH:
        reason = f"Mini-batches of this size ({size:g}) are too small for statistics of their own."
        new = (
            "FedWon (fedwon), which needs none, if the layers may change, else FedTAN (fedtan), or "
            "with one exchange a round FixBN (fixbn)"
        )
        return f"{reason} This suggests {as_trained if is_trained else new}."
    reason = (
        f"Clients' differences put the mean gradient off by {error:.0%} of its size, beyond chance."
    )
    count = len(diagnosis.actual.by_draw)
    if not is_certain(diagnosis):
        return (
            f"{reason} To suggest a method, more mini-batches than {count} are needed (--batches)."
        )
    if error < SMALL_EXCESS:
        return f"{reason} This suggests that BN is fine as it is (fedavg)."
    if is_trained:
        return f"{reason} This suggests {as_trained}."
    if domains > 1:
        return (
            f"{reason} Each client has one of {domains} domains. This suggests a model for each "
            "client (fedbn, or standalone if clients have many samples) or BN for each domain "
            "(fednorm); for one model FedWon (fedwon)."
        )
    one_exchange = (
        "carried corrections (fedtan:carry=true) if clients join most rounds, else FixBN (fixbn)"
    )
    if local_steps >= MANY_STEPS:
        return (
            f"{reason} With {local_steps} local steps this suggests FedWon (fedwon) if the layers "
            f"may change, else {one_exchange}."
        )
    return (
        f"{reason} This suggests FedTAN (fedtan), or with one exchange a round {one_exchange}; if "
        "the layers may change, the same with standardized weights of convolutions (such as "
        "fixbn+bn-ws)."
    )
