"""A user's own data, as they are in Python: `Data`, or a pair of training and test data."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.data.decoding import DEEPEST
from fedbn_flwr.data.pixels import Channels, normalize, resize
from fedbn_flwr.data.splits import FLOATS, LABEL_MAPS, USUAL_TASKS, Data, Split
from fedbn_flwr.plugins import warn_once

#: items of a `Dataset` that are read twice, to see whether they change
READ_TWICE = 8
#: values of label maps that are kept in 16 bits are smaller
MOST_IN_MAPS = 2**15
#: in label maps of bytes the mark of pixels without a class, or of the foreground
WHITE = 255
#: `Data`, or a pair of training and test data: each a `Split`, tensors or arrays (inputs, labels),
#: or a list or torch `Dataset` of pairs (input, label); or a function that returns one of these
OwnData = Data | tuple[Any, Any] | Callable[[], Data | tuple[Any, Any]]


def own_data(given: Any, name: str = "own data") -> Data:
    """Return a user's data as `Data`; a ValueError says what is allowed."""
    made = given
    if callable(given) and not isinstance(given, Data):
        made = given()
    if isinstance(made, Data):
        return made
    if not isinstance(made, tuple | list) or len(made) != 2:
        able = (
            "a name, fedbn_flwr.data.Data, a pair (training data, test data), or a function that "
            "returns one of these two"
        )
        raise ValueError(f"{name} must be {able}, got {type(made).__name__}")
    train, test = (
        _split(part, role) for part, role in zip(made, ("training", "test"), strict=True)
    )
    if train.targets == FLOATS:
        return _data(name, train, test, train.labels.shape[1:].numel())
    classes = torch.cat([train.counted, test.counted])
    if len(classes) == 0:
        return _data(name, train, test, 0)
    lowest = int(classes.min())
    highest = int(classes.max())
    if lowest > 0:
        shown = f"labels are {lowest} to {highest}, but classes are numbered from 0"
        raise ValueError(
            f"{shown}: give labels - {lowest}, or fedbn_flwr.data.Data if class 0 has no samples"
        )
    is_mark = train.targets == LABEL_MAPS and highest == WHITE
    if is_mark and not (classes == WHITE - 1).any():
        raise ValueError(
            f"label maps have the value {WHITE} and not {WHITE - 1}: number the classes from 0, "
            f"and give {IGNORED} to pixels without a class"
        )
    return _data(name, train, test, highest + 1)


def _data(name: str, train: Split, test: Split, num_classes: int) -> Data:
    return Data(name, train, test, num_classes, task=USUAL_TASKS[train.targets])


def preprocess(
    inputs: Any, trained: Tensor, mean: Channels = (), std: Channels = (), image_size: int = 0
) -> Tensor:
    """Return raw inputs (tensors or arrays) as training has the `trained` ones: scaled, normalized.

    Ids stay as they are.
    """
    raw = _inputs(_tensor(inputs))
    floats = raw if raw.is_floating_point() else trained
    if raw.dtype != trained.dtype and (
        {raw.dtype, trained.dtype} != {torch.uint8, torch.float32} or floats.max() > 1
    ):
        raise ValueError(
            f"inputs are {raw.dtype}, and those of training {trained.dtype}: give them in that type"
        )
    if image_size not in (0, raw.shape[-1]):
        raw = resize(raw, image_size)
    if raw.shape[1] == 1:
        raw = raw.expand(-1, trained.shape[1], *raw.shape[2:])
    return normalize(raw.clone(), mean, std)


def _split(part: Any, name: str) -> Split:
    if isinstance(part, Split):
        return part
    try:
        if hasattr(part, "__array__"):
            raise TypeError(
                f"a {type(part).__name__} has no labels: data is ((inputs, labels), (inputs, "
                "labels))"
            )
        is_pair = isinstance(part, tuple | list) and len(part) == 2
        inputs, labels = part if is_pair else _read(part, name)
        return _checked(_inputs(_tensor(inputs)).detach(), _tensor(labels).detach())
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        able = (
            "a fedbn_flwr.data.Split, a pair (inputs, labels) of tensors or arrays, or a list or "
            "torch Dataset of pairs (input, label)"
        )
        raise ValueError(f"the {name} data must be {able}: {error}") from error


def _read(dataset: Any, name: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the inputs and the labels of a torch `Dataset`.

    Warn if its items change between two reads.
    """
    items = [dataset[place] for place in range(len(dataset))]
    first = [item[0] if isinstance(item, tuple | list) else item for item in items]
    others = [
        type(each).__name__
        for each in first
        if isinstance(each, dict) or not hasattr(each, "__len__")
    ]
    if others:
        remedy = "PILToTensor makes tensors of images"
        if others[0] == "dict":
            remedy = "of a Hugging Face data set, save_to_disk, and give data='hf:FOLDER'"
        raise TypeError(f"its items must be (tensor, label), not {others[0]} ({remedy})")
    inputs, labels = zip(*items, strict=True)
    again = [dataset[place][0] for place in range(min(len(items), READ_TWICE))]
    if not torch.equal(_tensor(again), _tensor(inputs[: len(again)])):
        warn_once(
            f"the {name} data change with each read, and are read once: leave random transforms "
            "to `augmentation`"
        )
    return inputs, labels


def _tensor(values: Any) -> Tensor:
    for column in getattr(values, "columns", ()):
        if np.array(values[column]).dtype.kind not in "biuf":
            raise ValueError(f"column {column!r} holds no numbers")
    items: Sequence[Any] = ()
    if isinstance(values, tuple | list):
        items = values
    if any(isinstance(item, Tensor) for item in items):
        return torch.stack([torch.as_tensor(item) for item in items])
    if any(isinstance(item, np.ndarray) for item in items):
        values = np.array(items)  # torch would take them one by one
    if isinstance(values, np.ndarray):
        # torch takes neither negative strides nor the byte order of other machines
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    elif hasattr(values, "to_numpy"):  # data frames are read-only
        values = np.array(values)
    return torch.as_tensor(values)


def _inputs(values: Tensor) -> Tensor:
    """Return bytes as they are, 16 bits as floats from 0 to 1, other integers as ids, and real
    numbers as float32.
    """
    if values.dtype == torch.uint16:
        return values.to(torch.float32).div_(DEEPEST)
    if values.dtype == torch.uint8 or values.is_complex():  # which a Split refuses
        return values
    is_float = values.is_floating_point() or values.dtype == torch.bool
    return values.to(torch.float32 if is_float else torch.int64)


def _checked(inputs: Tensor, labels: Tensor) -> Split:
    shape = tuple(inputs.shape)
    if len(shape) == 4 and shape[1] == shape[2] > 4 >= shape[3]:
        remedy = "give inputs.permute(0, 3, 1, 2), or a Split if channels are first"
        raise ValueError(f"inputs of the shape {shape} look like channels last: {remedy}")
    if labels.is_complex():
        raise ValueError(
            "labels must be integers, the numbers of classes from 0, or float targets, not "
            f"{labels.dtype}"
        )
    if labels.is_floating_point():
        return Split(inputs, labels.to(torch.float32))
    if labels.dim() in (2, len(shape)) and labels.shape[1] == 1:
        labels = labels.squeeze(1)  # a column of labels, or label maps with a channel
    dtype = torch.int64
    if labels.dim() > 1 and labels.numel():
        values = labels.numpy(force=True)  # torch has no maximum of unsigned 16 bits
        if max(-int(values.min()), int(values.max())) < MOST_IN_MAPS:
            dtype = torch.int16
    return Split(inputs, labels.to(dtype))
