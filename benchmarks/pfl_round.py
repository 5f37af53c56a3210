"""The bare loop's round in pfl, Apple's simulator: `pip install pfl`."""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam.base import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.internal.ops import pytorch_ops  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]
from torch import Tensor, nn

from benchmarks.bare import BareLoop

#: more than the rounds of any case: in those it divides, pfl also evaluates
NEVER = 10**9

# pfl makes one by itself in a main process only
pytorch_ops.distributed = pytorch_ops.distributed or pytorch_ops.PyTorchDistributedContext()


class PflLoop(BareLoop):
    """Federated averaging of the parameters, with equal weights: pfl leaves BN's statistics in its
    one model, where each client moves them further.
    """

    def __init__(
        self, model: nn.Module, data: tuple[Tensor, Tensor], parts: Sequence[Tensor], **options: Any
    ) -> None:
        super().__init__(model, data, parts, **options)
        # what pfl asks of a network beside its layers
        network: Any = model
        network.loss = MethodType(_loss, model)
        network.metrics = MethodType(_no_metrics, model)
        central = torch.optim.SGD(model.parameters(), lr=1.0)
        self._pfl_model = PyTorchModel(network, torch.optim.SGD, central)
        users = FederatedDataset(
            self._drawn, get_user_sampler("minimize_reuse", list(range(len(parts))))
        )
        self._backend = SimulatedBackend(training_data=users, val_data=users)
        self._algorithm = FederatedAveraging()
        self._training = NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=self._lr,
            local_batch_size=self._batch_size,
        )

    def round(self) -> None:
        """Train every client from the same parameters, and average these."""
        self._set_mode()
        self._rounds += 1
        asked = NNAlgorithmParams(
            central_num_iterations=self._rounds,
            evaluation_frequency=NEVER,
            train_cohort_size=len(self._parts),
            val_cohort_size=None,
        )
        self._algorithm.run(
            asked, self._backend, self._pfl_model, self._training, send_metrics_to_platform=False
        )

    def state(self) -> dict[str, Tensor]:
        """The server's model."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _drawn(self, user: int) -> Any:
        """Return the mini-batches of a client's round as its data."""
        rows = torch.cat(list(self._batches(self._parts[user])))
        return Dataset((self._inputs[rows], self._labels[rows]))


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def _no_metrics(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
    return {}
