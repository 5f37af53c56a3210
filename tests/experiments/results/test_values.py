"""Means and paired differences, by hand."""

import pandas as pd

from fedbn_flwr.experiments.results.values import values_of


def test_a_setting_without_the_first_method_is_compared_with_its_own_first_one() -> None:
    numbers = pd.DataFrame(
        [
            ("one", "a", 0, "accuracy", 10.0),
            ("one", "b", 0, "accuracy", 12.0),
            ("two", "b", 0, "accuracy", 20.0),
            ("two", "c", 0, "accuracy", 25.0),
        ],
        columns=["setting", "label", "seed", "column", "value"],
    )
    differences = values_of(numbers)["difference"]
    assert differences["one", "accuracy", "b"] == 2.0
    assert differences["two", "accuracy", "b"] == 0.0
    assert differences["two", "accuracy", "c"] == 5.0
