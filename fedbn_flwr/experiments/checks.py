"""What cannot work in a run, found before anything is started: one clear line for each mistake."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch

from fedbn_flwr import data, models, norm
from fedbn_flwr.client.evaluation import AUC
from fedbn_flwr.client.learning_task import LOWER_IS_BETTER, OBJECTIVES, task_of
from fedbn_flwr.client.training import logits_of
from fedbn_flwr.data.partition import about_absent
from fedbn_flwr.data.splits import FLOATS, LABEL_MAPS
from fedbn_flwr.device import pick_device
from fedbn_flwr.experiments.config import Config, EngineOptions, NetworkOptions
from fedbn_flwr.experiments.experiment import Experiment
from fedbn_flwr.experiments.material import Material, absent_classes, load_data
from fedbn_flwr.experiments.output.sinks import check_sinks
from fedbn_flwr.layerwise.shared_statistics import check_layers
from fedbn_flwr.norm.detect import FunctionalBatchNorm, about_foreign
from fedbn_flwr.plugins import Own, described, warn_once
from fedbn_flwr.plugins.options import UsageError, refusing
from fedbn_flwr.strategies import BaseStrategy, Centralized, Layerwise
from fedbn_flwr.wire.closed_form import last_matrix, linear_layer


def checked_material(experiment: Experiment, strategy: BaseStrategy) -> Material | None:
    """Find what cannot work before anything is started: device, data, partition, model and
    strategy.

    Return what the run works with; None if all of it is at sites.
    """
    config = experiment.config
    drawn = experiment.config.clients_in_round()
    check_sinks(config.results.log_to)
    if (
        config.model.init_from not in ("", models.PRETRAINED)
        and not Path(config.model.init_from).expanduser().is_file()
    ):
        raise UsageError(f"no weights: there is no file {config.model.init_from} for init-from")
    material = None
    with refusing_for(config):
        pick_device(config.engine.device)
        if config.data.dataset != data.SITES:
            loaded = load_data(config.data)
            check_task(config, loaded)
            if loaded.num_classes == 1 and loaded.train.targets != FLOATS:
                one = ", ".join(loaded.class_names) or 0
                raise UsageError(f"{loaded.name} has one class only, {one}")
            material = Material.of(config, loaded)
            check_method_fits(material, strategy)
    if material is None and issubclass(experiment.strategy_class, Centralized):
        raise UsageError(
            f"method {config.method!r} needs all data in one place, but the data set 'sites' "
            "stays at the sites"
        )
    if material:
        refuse_percent(config.results.stop_at, material.task.metric)
    fewest = strategy.averager.fewest_nodes
    if config.clients and drawn < fewest:
        why = f"robust={strategy.averager} needs {fewest} nodes in a round"
        raise UsageError(
            f"method {config.method!r}: {why}, and {drawn} take part: {fewest - drawn} missing"
        )
    return material


@contextmanager
def refusing_for(config: Config) -> Iterator[None]:
    """Refuse data and a model that cannot be as bad input, and name the method if it may be why."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        # a model's weights may be those of a server
        about = str(error)
        text = str(config.method)
        # another method, or another normalizer, may do
        is_told = text in about or (config.model.norm == "bn" and ":" not in text)
        raise UsageError(about if is_told else f"method {config.method!r}: {about}") from error


def check_task(config: Config, loaded: data.Data) -> None:
    """Refuse a model, metrics or an augmentation that are not for the data set's task."""
    task = task_of(loaded.task, config.model.objective)
    if not (task.has_classes or config.model.objective):
        able = f"{', '.join(OBJECTIVES)} or package.module:function"
        raise UsageError(
            f"{loaded.name} has float targets, which need objective={able}; classes are integers "
            "from 0"
        )
    metrics = config.results.class_metrics
    if metrics and loaded.train.targets == FLOATS:
        if metrics != (AUC,) or loaded.train.is_dense:
            raise UsageError(f"class-metrics are of classes, and {loaded.name} has {FLOATS}")
        splits = (loaded.train, loaded.test)
        if any(((split.labels != 0) & (split.labels != 1)).any() for split in splits):
            raise UsageError(
                f"class-metrics={AUC} is of targets that are 0 or 1, and {loaded.name} has others"
            )
    if AUC in metrics and loaded.train.targets == LABEL_MAPS:
        raise UsageError(f"class-metrics={AUC} is of samples, and {loaded.name} has {LABEL_MAPS}")
    task.check_augmentation(config.training.augmentation)
    if config.training.augmentation != "none" and loaded.train.is_dense:
        raise UsageError(
            f"augmentation {config.training.augmentation!r} would change the images and not their "
            "float targets"
        )
    model = config.model.model
    entry = None if isinstance(model, Own) else models.MODELS.get(model)
    if entry is not None and task_of(entry.task).placed != task.placed:
        able = ", ".join(
            name
            for name, other in models.MODELS.items()
            if task_of(other.task).placed == task.placed
        )
        raise UsageError(
            f"model {config.model.model!r} is for {entry.task}, {loaded.name} for {loaded.task}; "
            f"there are: {able}"
        )


def refuse_percent(stop_at: float, metric: str) -> None:
    """Refuse a `stop-at` in percent where the score is a share, which would never reach it."""
    if stop_at > 1 and metric not in LOWER_IS_BETTER:
        meant = f"{stop_at:g} % is stop-at={stop_at / 100:g}"
        raise UsageError(
            f"stop-at must be at most 1, as {metric} is a share, got {stop_at:g}; {meant}"
        )


def check_method_fits(material: Material, strategy: BaseStrategy) -> None:
    """Refuse a model that does not fit the data, or with which the method would be another one."""
    config = material.config
    model = material.model.train()
    functional = check_shapes(material)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"model {config.model.model!r} has no parameter that learns (with requires_grad=True)"
        )
    lacking = norm.lacks(model, strategy.needs)
    if strategy.needs != "none" or config.model.norm != "bn":
        lacking = lacking or about_foreign(model)
        if functional:
            lacking = "the model's forward calls F.batch_norm, which it finds in layers only"
    if lacking:
        raise UsageError(f"method {config.method!r} would be another one: {lacking}")
    with refusing(f"method {config.method!r}: "):
        if strategy.closed_form:
            linear_layer(model, last_matrix(_shapes(model), strategy.closed_form))
        if isinstance(strategy, Layerwise):
            check_layers(model)
            return
    layers = norm.bn_layers(model)
    if layers and not any(layer.training for layer in layers.values()):
        warn_once("all BN layers are in eval mode in training, so they keep their statistics")


def check_shapes(material: Material) -> bool:
    """Refuse a model that cannot take the data's inputs, or has too few outputs for their classes.

    Return whether its forward pass calls `F.batch_norm` by itself. The model stays as it was.
    """
    loaded = material.data
    before = _shapes(material.model)
    # some models write their buffers in every pass
    material = replace(material, model=deepcopy(material.model))
    if not len(loaded.test):
        raise UsageError(f"{loaded.name} has no test samples")
    functional = [
        _check_inputs(material, split, role)
        for role, split in {"": loaded.train, "test ": loaded.test}.items()
    ]
    growing = before.items() ^ _shapes(material.model).items()
    if growing:
        raise UsageError(
            f"model {material.config.model.model!r} changes its entries in its first pass, such as "
            f"{min(growing)[0]!r}: hand it over after a pass over a mini-batch in training"
        )
    return any(functional)


def _shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def _check_inputs(material: Material, split: data.Split, role: str) -> bool:
    config = material.config
    loaded = material.data
    model = material.model
    shape = tuple(split.inputs.shape[1:])
    if len(shape) != 3 and config.training.augmentation != "none":
        raise UsageError(
            f"augmentation {config.training.augmentation!r} is for images, not for inputs of the "
            f"shape {shape}"
        )
    device = next((parameter.device for parameter in model.parameters()), None)
    kind = "inputs"
    dtype = None
    if split.has_ids:
        kind = "integers (ids: other numbers are float32)"
        dtype = torch.int64
    # BN without running statistics cannot take one sample
    inputs = torch.zeros(2, *shape, device=device, dtype=dtype)
    # layers that make their entries in a first pass do it here; what else fails is found later
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
        model.train()(inputs)
    try:
        with torch.no_grad(), FunctionalBatchNorm(model) as functional:
            outputs = model.eval()(inputs)
    except Exception as error:  # of whatever kind a user's function raises
        about = f"model {config.model.model!r} cannot take {role}{kind} of the shape {shape}"
        raise UsageError(f"{about}: {described(error)}") from error
    logits = logits_of(outputs)
    outputs_each = logits.numel() // len(inputs)
    if config.model.objective in OBJECTIVES and outputs_each != loaded.num_classes:
        raise UsageError(
            f"model {config.model.model!r} has {outputs_each} outputs for {loaded.num_classes} "
            "targets"
        )
    places: tuple[int, ...] = ()
    if material.task.placed:
        places = shape[1:]
    if material.task.has_classes and (logits.dim() < 2 or logits.shape[2:] != places):
        raise UsageError(
            f"model {config.model.model!r} has outputs of the shape {tuple(logits.shape[1:])} for "
            f"a {role}sample, not {(loaded.num_classes, *places)}"
        )
    if config.model.objective:
        targets = split.batch(torch.zeros(len(inputs), dtype=torch.int64), logits.device)[1]
        try:
            material.task.loss(outputs, targets)
        except Exception as error:  # of whatever kind a user's function raises
            raise UsageError(
                f"objective {config.model.objective!r} fails for the outputs of the model: {error}"
            ) from error
    if material.task.has_classes and logits.shape[1] != loaded.num_classes:
        about = (
            f"model {config.model.model!r} has {logits.shape[1]} outputs for "
            f"{loaded.num_classes} classes"
        )
        if logits.shape[1] < loaded.num_classes:
            raise UsageError(about)
        warn_once(f"{about}: a prediction of none of them counts as wrong")
    return bool(functional.found)


def check_simulation(experiment: Experiment) -> tuple[Material, BaseStrategy]:
    """Check a run that brings its own nodes, and so must know how many.

    Return what it works with, and its strategy.
    """
    config = experiment.config
    refuse_sites(config.network)
    strategy = experiment.make_strategy(config.clients)
    material = checked_material(experiment, strategy)
    if material is None:
        raise UsageError(
            "the data set 'sites' is at the sites of a deployment: submit the run with `flwr run`"
        )
    names = material.data.class_names
    plain = ["".join(name.casefold().split()) for name in names]
    alike = [name for name, short in zip(names, plain, strict=True) if plain.count(short) > 1]
    if alike:
        warn_once(
            "classes differ only by upper case or spaces, and count as different ones: "
            f"{', '.join(alike)}"
        )
    classes = absent_classes(material.data, material.partition)
    if classes:
        warn_once(about_absent(classes, config.data.partition, config.clients))
    return material, strategy


def refuse_sites(options: NetworkOptions) -> None:
    """Refuse to choose sites where there are none."""
    if options.sites:
        raise UsageError(
            f"sites={','.join(options.sites)!r} chooses sites of a deployment, and a simulation "
            "has none"
        )


def refuse_own_nodes(options: EngineOptions) -> None:
    """Refuse `state-dir` and `workers` where Flower runs the nodes, in processes and with memory of
    its own.
    """
    if options.state_dir or options.workers > 1:
        if options.state_dir:
            given = f"state-dir {options.state_dir!r}"
        else:
            given = f"workers={options.workers}"
        raise UsageError(
            f"{given} only works with the engines 'stacked' and 'inprocess': Flower has its own "
            "nodes"
        )
