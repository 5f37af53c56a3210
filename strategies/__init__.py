"""Flower strategies, one file each. The public import path is `fedbn_flwr.strategies`."""

from .centralized import Centralized
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedprox import FedProx
from .fixbn import FixBN
from .partial import PartialSharing
from .registry import REGISTRY
from .replies import NodeReply, NotObeyedError
from .sampling import wait_for_nodes
from .silobn import SiloBN
from .standalone import Standalone

__all__ = [
    "REGISTRY",
    "Centralized",
    "FedAvg",
    "FedBN",
    "FedProx",
    "FixBN",
    "NodeReply",
    "NotObeyedError",
    "PartialSharing",
    "SiloBN",
    "Standalone",
    "wait_for_nodes",
]
