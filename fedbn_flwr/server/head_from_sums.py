"""A head in closed form, on the server: what nodes are asked, what is refused, the solution.

The mathematics is in `fedbn_flwr/wire/closed_form.py`, the nodes' pass in
`fedbn_flwr/client/passes.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from logging import INFO

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.server.pooling import PooledGroup, average, name_dominant
from fedbn_flwr.server.replies import (
    CannotTrainError,
    Expected,
    NodeReply,
    RefusedError,
    log_refused,
)
from fedbn_flwr.server.round import Round
from fedbn_flwr.state import Arrays, arrays_to_record
from fedbn_flwr.wire.closed_form import (
    CROSS,
    LAST,
    MOMENTS_PASS,
    RIDGE,
    HeadMoments,
    last_matrix,
)

#: what nodes send
HEAD = PooledGroup("moments of features", wire.MOMENTS, is_robust=False)
#: the most bytes that a node may be asked for
MOST_BYTES = 256 * 10**6
#: the factor of a solution that a softmax follows: outputs of ridge regression are near 0 and 1,
#: and a cross-entropy takes such logits for guesses
LOGITS = 10.0
#: how far numbers that are derived from others may lie from them
SLACK = 1e-6


class Head:
    """The layer of a model that gets a solution in closed form."""

    def __init__(self, current: Arrays, asked: str = LAST) -> None:
        shapes = {name: array.shape for name, array in current.items()}
        try:
            self.name = last_matrix(shapes, asked)
        except ValueError as error:
            raise CannotTrainError(str(error)) from None
        self.weight = f"{self.name}.weight"
        self.bias = f"{self.name}.bias"
        self.outputs, self.features = shapes[self.weight]
        self.has_bias = self.bias in shapes

    def orders(self, kind: str) -> str:
        """Return the `gather` of an instruction that asks for this layer's moments."""
        return f"{kind}:{self.name}"

    def forms(self, kind: str, has_labels: bool = True) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what nodes send."""
        rows = self.features + 1
        forms: dict[str, tuple[int, ...]] = {CROSS[has_labels]: (rows, self.outputs)}
        if kind == MOMENTS_PASS:
            forms["second"] = (rows * (rows + 1) // 2,)
        return forms

    def say_cost(self, kind: str) -> None:
        """Say what a node sends; CannotTrainError if that is more than `MOST_BYTES`."""
        size = 8 * sum(int(np.prod(form)) for form in self.forms(kind).values())
        about = f"{size / 1e6:.1f} MB once, the moments of {self.features} features"
        if size > MOST_BYTES:
            raise CannotTrainError(
                f"each node would send {about}; at most {MOST_BYTES / 1e6:g} MB are: take fedncm, "
                "or a layer before it that maps features to fewer, at random"
            )
        log(INFO, "Each node sends %s, for layer %s", about, self.name)

    def check(self, kind: str, reply: NodeReply, class_weights: np.ndarray | float = 1.0) -> None:
        """Refuse moments which no samples have."""
        arrays = reply.records[wire.MOMENTS]
        forms = {name: array.shape for name, array in arrays.items()}
        able = [self.forms(kind)]
        if kind == MOMENTS_PASS:  # means by class are of labels
            able.append(self.forms(kind, has_labels=False))
        if forms not in able or any(array.dtype != np.float64 for array in arrays.values()):
            raise RefusedError(f"its moments are not of layer {self.name!r}")
        fault = _fault(read_head_moments(arrays), class_weights)
        if fault:
            raise RefusedError(f"its moments are of no samples: {fault}")

    def put(self, current: Arrays, weight: torch.Tensor, bias: torch.Tensor) -> Arrays:
        """Return the model's state with a solution in the layer's place."""
        solved = {self.weight: weight}
        if self.has_bias:
            solved[self.bias] = bias
        new = {name: value.numpy().astype(current[name].dtype) for name, value in solved.items()}
        return {**current, **new}


def read_head_moments(arrays: Mapping[str, np.ndarray]) -> HeadMoments:
    """Return moments as nodes sent them, or their mean."""
    packed = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    return HeadMoments.unpack(packed)


def _fault(moments: HeadMoments, class_weights: np.ndarray | float) -> str:
    # a label is its own square, and the labels of a sample sum to one
    labels = moments.cross[-1]
    one = 1.0
    if moments.has_labels:
        one = float(labels.sum())
        shares = labels / torch.as_tensor(class_weights)
        if (shares < 0).any() or abs(float(shares.sum()) - 1) > SLACK:
            return "the shares of its classes are not those of a whole"
    if moments.second is None:
        return ""
    squares = moments.second.diagonal()
    if (squares < 0).any():
        return "a mean square is negative"
    if abs(float(squares[-1]) - one) > SLACK * one:
        return "its samples do not count as one"
    products = [(moments.second, squares)]
    if moments.has_labels:
        products.append((moments.cross, labels))
    if any(_exceeds(found, squares[:, None] * others) for found, others in products):
        return "a product is larger than its factors allow"
    return ""


def _exceeds(products: torch.Tensor, bound: torch.Tensor) -> bool:
    """Return whether mean products are larger than those of mean squares allow."""
    return bool((products.square() > bound * (1 + SLACK) + SLACK**2).any())


def solved_head(
    arrays: ArrayRecord, config: ConfigRecord, grid: Grid, asked: str, timeout: float
) -> ArrayRecord:
    """Return a model with its last layer solved from all nodes' moments, scaled for a softmax if
    targets are labels.

    Nodes that fail are left out, and named in the log; CannotTrainError if all do.
    """
    now = Round.begin(0, arrays, config, grid)
    head = Head(now.current, asked)
    head.say_cost(MOMENTS_PASS)
    instruction = replace(now.instruction, gather=head.orders(MOMENTS_PASS))
    expected = Expected(
        instruction.binding_keys(),
        {},
        groups=(wire.MOMENTS,),
        check=partial(head.check, MOMENTS_PASS),
    )
    models = dict.fromkeys(sorted(grid.get_node_ids()), arrays)
    replies, refused = now.ask_pass(instruction, models, timeout, expected)
    if not replies:
        reason = next(iter(refused), "none answered")
        raise CannotTrainError(f"no node could sum up its features: {reason}")
    log_refused(refused)
    name_dominant(
        {node: count for reply in replies for node, count in reply.counts.items()},
        "the head in closed form",
    )
    pooled = average(
        [reply.records[wire.MOMENTS] for reply in replies],
        [reply.num_examples for reply in replies],
    )
    moments = read_head_moments(pooled)
    weight, bias = solve(moments, RIDGE, head)
    if moments.has_labels:
        weight = LOGITS * weight
        bias = LOGITS * bias
    return arrays_to_record(head.put(now.current, weight, bias))


def solve(moments: HeadMoments, ridge: float, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and the bias of ridge regression; CannotTrainError if there are none."""
    try:
        return moments.solve(ridge, head.has_bias)
    except ValueError as error:
        raise CannotTrainError(str(error)) from None
