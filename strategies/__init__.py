"""Flower strategies, one file each. The public import path is `fedbn_flwr.strategies`."""

from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.server.privacy import Privacy
from fedbn_flwr.server.replies import CannotTrainError, DivergedError, NodeReply, NotObeyedError, Pooled
from fedbn_flwr.server.sampling import wait_for_nodes

from .base_gathering import Gathering
from .base_layerwise import Layerwise
from .base_partial import PartialSharing
from .centralized import Centralized
from .fedavg import FedAvg, Shared
from .fedbn import FedBN
from .fedbs import FedBS
from .feddna import FedDNA
from .fednorm import FedNorm
from .fedprox import FedProx
from .fedtan import FedTAN
from .fedtan_ii import FedTANII
from .fedwon import FedWon
from .fixbn import FixBN
from .hbn import HBN
from .heterofl import HeteroFL
from .mtfl import MTFL
from .registry import REGISTRY, prepare, register_strategy
from .scaffold import Scaffold
from .silobn import SiloBN
from .standalone import Standalone

__all__ = [
    "HBN",
    "MTFL",
    "REGISTRY",
    "BaseStrategy",
    "CannotTrainError",
    "Centralized",
    "DivergedError",
    "FedAvg",
    "FedBN",
    "FedBS",
    "FedDNA",
    "FedNorm",
    "FedProx",
    "FedTAN",
    "FedTANII",
    "FedWon",
    "FixBN",
    "Gathering",
    "HeteroFL",
    "Layerwise",
    "NodeReply",
    "NotObeyedError",
    "PartialSharing",
    "Pooled",
    "Privacy",
    "Scaffold",
    "Shared",
    "SiloBN",
    "Standalone",
    "prepare",
    "register_strategy",
    "wait_for_nodes",
]
