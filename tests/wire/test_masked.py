"""Replies as numbers to be summed, and means made of the sums: at the edges."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.wire import masked
from fedbn_flwr.wire.masked import Terms


@pytest.mark.parametrize(("change", "below"), [(0.5, 1), (1.0, 0), (2.0, 0)])
def test_a_metric_at_the_bound_is_not_below_it(change: float, below: int) -> None:
    content = RecordDict({wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: 3, "change": change})})
    form, numbers = masked.to_numbers(content, Terms("examples", "change", 1.0))
    assert masked.to_content(form, numbers, {1000: 0}).tally == masked.Tally(1, change, 0.0, below)


@pytest.mark.parametrize("kind", ["exchange", "moments"])
def test_rounding_makes_no_variance_negative(kind: str) -> None:
    """Means that are large beside their variance: the second moments' difference is mostly rounding."""
    means, variance = np.linspace(1e7, 3e8, 500), np.full(500, 1e-9)
    moments = {"bn/count": np.array(3.0), "bn/mean": means, "bn/variance": variance}
    arrays = {"request": {"bn": np.stack([means, variance])}, wire.MOMENTS: moments}
    group = "request" if kind == "exchange" else wire.MOMENTS
    content = RecordDict(
        {
            group: ArrayRecord({name: Array(values) for name, values in arrays[group].items()}),
            wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: 3}),
            wire.REPORT: ConfigRecord({"kind": "statistics", "count": 3} if kind == "exchange" else {}),
        }
    )
    form, numbers = masked.to_numbers(content, Terms("examples"))
    mean = masked.to_content(form, numbers * 3, dict.fromkeys(range(3), 0)).array_records[group]
    found = mean["bn"].numpy()[1] if kind == "exchange" else mean["bn/variance"].numpy()
    assert found.min() == 0
