"""The cohort engine: clients of one process that train at the same time, their models stacked along a dimension.

`CohortGrid` is a Flower `Grid`, so every strategy runs on it unchanged. It finds the messages of a push that ask for
the same (`grid`), has them answered together (`learning`) by a `Stack` of models under `torch.func.vmap` (`stack`), BN
layers in one call each (`beside`), and leaves to the one-after-another engine what cannot be stacked, saying why. The
clients of a layer-wise step go from exchange to exchange together (`steps`). What is fastest for a model on a machine
is measured (`choice`).
"""

from fedbn_flwr.simulation.stacked.grid import CohortGrid
from fedbn_flwr.simulation.stacked.training import train_together

__all__ = ["CohortGrid", "train_together"]
