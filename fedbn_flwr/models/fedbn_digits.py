"""FedBN's network for 28x28 digits."""

from torch import nn

from fedbn_flwr.models.blocks import conv_bn_relu, linear_bn_relu
from fedbn_flwr.models.registry import register_model


@register_model("digits-cnn", smallest=28, largest=28)
def digits_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Three convolutions and three linear layers, BN after all but the last (Li et al., "FedBN", 2021).

    FedWon calls the same network a five-layer CNN; this is the one that FedBN published (its appendix D).
    """
    del image_size  # 28: two pools leave 7 x 7 positions of 128 channels
    return nn.Sequential(
        *conv_bn_relu(in_channels, 64, 5, padding=2),
        nn.MaxPool2d(2),
        *conv_bn_relu(64, 64, 5, padding=2),
        nn.MaxPool2d(2),
        *conv_bn_relu(64, 128, 5, padding=2),
        nn.Flatten(),
        *linear_bn_relu(7 * 7 * 128, 2048),
        *linear_bn_relu(2048, 512),
        nn.Linear(512, num_classes),
    )
