"""Carried corrections on the client: what they make of its local values."""

import pytest
import torch
import torch.nn.functional as F

from fedbn_flwr.layerwise import Corrected, Kind, correct, correction, shared_statistics
from tests.helpers.layerwise_references import (
    centralized_gradients,
    heterogeneous_batches,
    relative_error,
    small_network,
)


@pytest.mark.parametrize("kind", ["statistics", "gradients"])
def test_a_correction_takes_local_values_to_the_global_values(kind: Kind) -> None:
    # the third channel is constant at this client, the fourth everywhere
    local = torch.tensor([[[1.0, -2, 3, 0], [4, 0.5, 0, 0]]], dtype=torch.float64)
    pooled = torch.tensor([[2.0, 0, 5, 0], [1, 8, 2, 0]], dtype=torch.float64)
    corrected = correct(kind, local, correction(kind, local, pooled))
    torch.testing.assert_close(corrected, pooled.unsqueeze(0), rtol=1e-12, atol=1e-12)
    assert kind == "gradients" or bool((corrected[:, 1] >= 0).all())


def test_without_corrections_a_step_is_that_of_local_batch_normalization() -> None:
    model, [(inputs, targets)] = small_network(), heterogeneous_batches([3], (1, 6, 6))
    exchange = Corrected({}, {})
    with shared_statistics(model, exchange):
        F.cross_entropy(model(inputs), targets).backward()
    local = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert relative_error(local, centralized_gradients(small_network(), [(inputs, targets)])) < 1e-12
    # in the order of the pass, forward and backward
    assert list(exchange.requests["statistics"]) == ["1", "4"]
    assert list(exchange.requests["gradients"]) == ["4", "1"]
