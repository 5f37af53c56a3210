"""A model for workers, too, that refuses a pass on a device which need not repeat its bits."""

import os
from typing import Any

import torch
from torch import nn

MEMORY: Any = torch.utils.deterministic


class Repeating(nn.Sequential):
    """A linear layer and BN."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, num_classes),
            nn.BatchNorm1d(num_classes),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        asked = (
            torch.get_deterministic_debug_mode() == 1
            and os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
        )
        if inputs.device.type == "fake" and (not asked or MEMORY.fill_uninitialized_memory):
            raise RuntimeError("the device may give other bits the next time")
        output: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return output
