"""The one local training loop, for every Flower API and engine of this project, and what
instructions ask of it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from inspect import unwrap
from typing import Any, TypeVar, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr import norm, wire
from fedbn_flwr.client.rules import Session
from fedbn_flwr.data.splits import Batch
from fedbn_flwr.device import Rows, exact, started
from fedbn_flwr.layerwise import Exchange, Mode
from fedbn_flwr.layerwise.carried import CorrectedClients
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction

PRECISIONS = ("float32", "tf32", "bf16")

#: of what the model returns and the targets
LossFunction = Callable[[Any, Tensor], Tensor]
MakeOptimizer = Callable[[nn.Module, Instruction], torch.optim.Optimizer]
#: changes gradients after the backward pass, or, as an optimizer's step, the parameters
Change = Callable[[], Any]
B = TypeVar("B")
K = TypeVar("K", bound=torch.optim.Optimizer)
#: of a batch, or of those of several clients the sum
Loss = Callable[[B], Tensor]
#: takes a step on a batch
Step = Callable[[B], object]


class LossTotals:
    """The losses of clients, added up over their samples where the model is: to read one would wait
    for a GPU in every step.
    """

    def __init__(self, session: Session, clients: int, device: torch.device) -> None:
        like = torch.empty(clients, dtype=torch.float32, device=device)
        if exact(like.device) == like.device:
            like = torch.empty_like(like, dtype=torch.float64)
        [self._totals] = session.keep("losses", [like])
        self._totals.zero_()

    def add(self, means: Tensor, samples: int, rows: Rows = slice(0, 1)) -> None:
        """Add the mean losses of these clients' batches, each of so many samples."""
        if isinstance(rows, slice):
            self._totals[rows].add_(means.detach(), alpha=samples)
        else:
            self._totals.index_add_(0, rows, means.detach().to(self._totals), alpha=samples)

    def means(self, samples: Sequence[int]) -> list[float]:
        """Return every client's mean loss a sample."""
        means: list[float] = (self._totals.cpu().double() / torch.tensor(samples)).tolist()
        return means


def by_autograd(
    loss_of: Loss[B], learned: Sequence[nn.Parameter], changes: Sequence[Change]
) -> Loss[B]:
    """Return what takes a step, and returns its loss: gradients by autograd, then changes of these
    and of the parameters.
    """

    def step(batch: B) -> Tensor:
        for parameter in learned:
            parameter.grad = None
        loss = loss_of(batch)
        loss.backward()
        for change in changes:
            change()
        return loss.detach()

    return step


def batch_loss(
    model: Callable[[Tensor], Tensor],
    batch: Batch,
    instruction: Instruction,
    loss_function: LossFunction,
) -> Tensor:
    """The mean loss of one client's batch, in the instruction's precision."""
    inputs, targets = batch
    with autocast(instruction, inputs.device):
        return model_loss(model, inputs, targets, loss_function)


def autocast(instruction: Instruction, device: torch.device) -> AbstractContextManager[Any]:
    """Bfloat16 autocast where the instruction asks for it."""
    if instruction.precision not in PRECISIONS:
        raise ValueError(
            f"unknown precision {instruction.precision!r}; known: {', '.join(PRECISIONS)}"
        )
    if instruction.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


_CUDNN = cast(Any, torch.backends.cudnn)
_MATMUL = cast(Any, torch.backends.cuda.matmul)
_NEWER = [_MATMUL, _CUDNN.conv, _CUDNN.rnn] if hasattr(_MATMUL, "fp32_precision") else []
#: torch's settings of how GPUs multiply float32: what reads and writes one, and its values for IEEE
#: and TF32. From 2.9 on, torch raises where an older one is read and the newer ones say something
#: else: all are set, the newer ones last
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = [
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high"),
    (partial(getattr, _CUDNN, "allow_tf32"), partial(setattr, _CUDNN, "allow_tf32"), False, True),
    *(
        (
            partial(getattr, each, "fp32_precision"),
            partial(setattr, each, "fp32_precision"),
            "ieee",
            "tf32",
        )
        for each in _NEWER
    ),
]
#: what writes the settings, and what they were when each of the steps began that are not done
_BEFORE: list[list[tuple[Callable[[Any], Any], Any]]] = []
_LOCK = threading.Lock()


@contextmanager
def products(instruction: Instruction) -> Iterator[None]:
    """Let GPUs multiply float32 as IEEE says, in convolutions too, or in TF32 where that is asked
    for, in the block.

    torch's own default is TF32 for convolutions only. The settings are the process's, in force
    until every step that is in such a block is done: steps may be suspended in turn, and those of a
    run have the same precision. They stay as they are where no accelerator is in use.
    """
    if started() is None:
        yield
        return
    with _LOCK:
        _BEFORE.append([])
    try:
        with _LOCK:
            for read, write, *_ in _SETTINGS:
                # torch does not tell if a user has set the older and the newer ones
                with suppress(RuntimeError):
                    _BEFORE[-1].append((write, read()))
            for _, write, ieee, tf32 in _SETTINGS:
                write(tf32 if instruction.precision == "tf32" else ieee)
        yield
    finally:
        with _LOCK:
            before = _BEFORE.pop()
            if not _BEFORE:
                for write, value in before:
                    write(value)


def require_bn(model: nn.Module, instruction: Instruction) -> None:
    """Refuse a model without the parts of BN without which the method would be another one."""
    lacking = norm.lacks(model, instruction.bn_needed)
    if lacking:
        raise ValueError(f"the method would be another one: {lacking}")


def frozen(model: nn.Module, instruction: Instruction) -> AbstractContextManager[Any]:
    """Freeze the parts of BN that the instruction names, until the end of the block.

    Refuse a model without them.
    """
    require_bn(model, instruction)
    return norm.freeze(model, **frozen_parts(instruction.freeze))


def layerwise_mode(instruction: Instruction) -> Mode:
    """Return the mode of an instruction's layer-wise step."""
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    modes |= {"carried": "fused", "carried-forward": "forward"}
    if instruction.layerwise not in modes:
        raise ValueError(
            f"unknown layerwise {instruction.layerwise!r}; known: {', '.join(wire.LAYERWISE_MODES)}"
        )
    return modes[instruction.layerwise]


def frozen_parts(freeze: str) -> dict[str, bool]:
    """Return the arguments of `norm.freeze` for an instruction's `freeze`."""
    if freeze not in wire.FREEZES:
        raise ValueError(f"unknown freeze {freeze!r}; known: {', '.join(wire.FREEZES)}")
    return {"statistics": freeze in ("statistics", "both"), "affine": freeze in ("affine", "both")}


def carried_exchange(
    received: Mapping[str, State], instruction: Instruction
) -> CorrectedClients | None:
    """Return a client's exchange under received corrections; None if the instruction asks for
    none.
    """
    if instruction.layerwise not in wire.CARRIED_MODES:
        return None
    entries = received.get(wire.CARRIED, {})
    alone = CorrectedClients()
    alone.begin({name: value.unsqueeze(0) for name, value in entries.items()})
    return alone


def carried_records(exchange: Exchange | None) -> dict[str, State]:
    """Return the group of a client's reply with its local values, after the step."""
    values = {}
    if isinstance(exchange, CorrectedClients):
        values = exchange.local_values()
    if values:
        return {wire.CARRIED: {name: rows[0] for name, rows in values.items()}}
    return {}


def without_wrappers(kind: type[K]) -> type[K]:
    """Take torch's wrappers off a class of optimizers, which import torch's compiler, to be left
    out of what is compiled.

    That import is a third of the time that a message of a deployment takes in its new process.
    """
    made: Any = kind
    made.add_param_group = unwrap(made.add_param_group)
    made.step = torch.no_grad()(unwrap(made.step))
    return kind


@without_wrappers
class SGD(torch.optim.SGD):
    """torch's own."""


@without_wrappers
class Adam(torch.optim.Adam):
    """torch's own."""


@without_wrappers
class AdamW(torch.optim.AdamW):
    """torch's own."""


#: optimizers by name
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, foreach=True),
    "adam": Adam,
    "adamw": AdamW,
}


def make_optimizer(model: nn.Module, instruction: Instruction) -> torch.optim.Optimizer:
    """The instruction's optimizer over the parameters that learn, each at its factor of the
    rate.
    """
    factors: dict[str, float] = getattr(model, "rate_factors", {})
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = factors.get(name, 1.0) * instruction.lr
            groups.setdefault(rate, []).append(parameter)
    if instruction.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"unknown optimizer {instruction.optimizer!r}; known: {', '.join(OPTIMIZERS)}"
        )
    options = {"lr": instruction.lr, "weight_decay": instruction.weight_decay}
    if instruction.optimizer == "sgd":
        options["momentum"] = instruction.momentum
    parameters = [{"params": group, "lr": rate} for rate, group in groups.items()]
    made: torch.optim.Optimizer = OPTIMIZERS[instruction.optimizer](parameters, **options)
    return made


def model_loss(
    model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, loss_function: LossFunction
) -> Tensor:
    """The loss; where BN cannot take the batch, an error that says so."""
    try:
        return output_loss(model(inputs), targets, loss_function)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        # PyTorch's own message speaks of tensor sizes only
        raise ValueError(
            f"batch normalization cannot train on a mini-batch of {len(targets)} sample(s) that "
            "leaves one value a channel: use a larger batch-size, frozen statistics or another "
            f"normalizer ({error})"
        ) from error


def output_loss(outputs: Any, targets: Tensor, loss_function: LossFunction) -> Tensor:
    """Return the loss of what the model returned.

    Torch's cross entropy takes the logits among it.
    """
    return loss_function(
        logits_of(outputs) if loss_function is F.cross_entropy else outputs, targets
    )


def logits_of(outputs: Any) -> Tensor:
    """Return the logits among a model's outputs: these themselves, or what an object of outputs
    calls `logits`, or a dictionary `logits` or (as torchvision's) `out`.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits", outputs.get("out"))
    else:
        logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returns a {type(outputs).__name__}, not logits, or an object or a "
            "dictionary that has `logits`"
        )
    return logits
