"""Networks without normalizers."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.norm.registry import register_norm
from fedbn_flwr.norm.substitute import Slot, swap_normalizers


@register_norm("none")
def remove_normalizers(model: nn.Module) -> nn.Module:
    """Take every normalizer out; every convolution without a bias gets one, at zero.

    A convolution before a normalizer often has no bias, because beta does its work. Which convolution a
    normalizer belonged to cannot be told for any model, so all have one afterwards, as in normalizer-free
    networks (Brock et al. 2021); a model whose normalizers had no beta stays without.
    """
    shifted = False

    def drop(slot: Slot) -> nn.Module:
        nonlocal shifted
        shifted = shifted or (slot.affine and slot.layer.bias is not None)
        return nn.Identity()

    model = swap_normalizers(model, drop)
    if shifted:
        _give_biases(model)
    return model


def _give_biases(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, _ConvNd) and layer.bias is None:
            layer.bias = nn.Parameter(layer.weight.new_zeros(layer.out_channels))
