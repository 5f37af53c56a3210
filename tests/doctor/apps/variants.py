"""BN of other classes: synchronized, with its activation inside, and one that is frozen for good."""

from common import Net, plain_client, plain_server
from timm.layers import BatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d


def make():
    net = Net()
    net.bn1 = nn.Sequential(FrozenBatchNorm2d(6), nn.SyncBatchNorm(6))
    net.norm = BatchNormAct2d(8)
    return net


server = plain_server(make)
client = plain_client(make)
EXPECTED = {"variants", "others", "averaged", "counters"}
