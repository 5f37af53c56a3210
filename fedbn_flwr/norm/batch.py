"""Batch normalization over inputs of any number of dimensions."""

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNorm(_BatchNorm):
    """torch's batch normalization of (N, C) and (N, C, ...) inputs alike.

    Ioffe and Szegedy, "Batch Normalization", 2015: y = gamma (x - mean) / sqrt(var + eps) + beta.
    It stands where the layer that it replaces does not say how many dimensions its inputs have (a GroupNorm),
    and is what this package's variants of BN derive from.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of shape (N, C, ...), got {tuple(input.shape)}")


def channel_axes(inputs: Tensor) -> tuple[int, ...]:
    """The axes that batch statistics are taken over: all but the channels'."""
    return (0, *range(2, inputs.dim()))


def along_channels(values: Tensor, inputs: Tensor) -> Tensor:
    """Reshape a value for each channel so that it broadcasts over the inputs."""
    return values.reshape(-1, *[1] * (inputs.dim() - 2))
