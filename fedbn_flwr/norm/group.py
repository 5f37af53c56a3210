"""Normalization of each sample by itself: groups of channels, all channels, one channel."""

from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """Group normalization that refuses to normalize a single value, which would be zero whatever came in.

    Wu and He, "Group Normalization", 2018: each sample's channels are normalized in `num_groups` groups.
    Layer normalization over (C, ...) is one group; instance normalization is one group a channel. None keeps
    running statistics.
    """

    def __init__(self, groups: int, channels: int, name: str = "", eps: float = 1e-5, affine: bool = True):
        super().__init__(groups, channels, eps=eps, affine=affine)
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; a group of one value is an error that names the layer."""
        if input[0].numel() == self.num_groups:
            raise ValueError(
                f"layer {self.name!r} would normalize groups of a single value (input {tuple(input.shape)}, "
                f"{self.num_groups} groups), which gives zero whatever the input: use fewer groups"
            )
        return super().forward(input)
