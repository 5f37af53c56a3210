"""Pictures of runs."""

import pandas as pd

from fedbn_flwr.experiments.results.plots import smoothed


def test_losses_are_means_over_the_last_rounds_of_each_run() -> None:
    rows = [("a", 0, 1, 4.0), ("a", 1, 1, 10.0), ("a", 0, 2, 2.0), ("b", 0, 1, 8.0)]
    rows += [("a", 1, 2, 30.0), ("a", 0, 3, 6.0)]
    points = pd.DataFrame(rows, columns=["label", "run", "x", "y"])
    assert list(smoothed(points, 2)["y"]) == [4.0, 10.0, 3.0, 8.0, 20.0, 4.0]
    assert list(smoothed(points, 1)["y"]) == list(points["y"])
