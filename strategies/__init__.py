"""Flower strategies. The public import path is `fedbn_flwr.strategies`."""

from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.server.grids import wait_for_nodes
from fedbn_flwr.server.method_state import BY_NODE, MethodState
from fedbn_flwr.server.pooling import Pooled, PooledGroup, Sent
from fedbn_flwr.server.privacy import Privacy
from fedbn_flwr.server.replies import (
    CannotTrainError,
    DivergedError,
    NodeReply,
    NotObeyedError,
    RefusedError,
)

from .base_layerwise import Layerwise
from .fbn import FBN
from .fed3r import Fed3R, FedNCM, PersonalFed3R
from .fedavg import FedAvg
from .fedbs import FedBS
from .fednorm import FedNorm
from .fedprox import FedProx
from .fedtan import FedDNA, FedTAN, FedTANII
from .fedwon import FedWon
from .fixbn import Centralized, FixBN
from .hbn import HBN
from .heterofl import HeteroFL
from .partial_sharing import MTFL, FedBN, PartialSharing, SiloBN, Standalone
from .registry import REGISTRY, prepare, register_strategy
from .scaffold import Scaffold

__all__ = [
    "BY_NODE",
    "FBN",
    "HBN",
    "MTFL",
    "REGISTRY",
    "BaseStrategy",
    "CannotTrainError",
    "Centralized",
    "DivergedError",
    "Fed3R",
    "FedAvg",
    "FedBN",
    "FedBS",
    "FedDNA",
    "FedNCM",
    "FedNorm",
    "FedProx",
    "FedTAN",
    "FedTANII",
    "FedWon",
    "FixBN",
    "HeteroFL",
    "Layerwise",
    "MethodState",
    "NodeReply",
    "NotObeyedError",
    "PartialSharing",
    "PersonalFed3R",
    "Pooled",
    "PooledGroup",
    "Privacy",
    "RefusedError",
    "Scaffold",
    "Sent",
    "SiloBN",
    "Standalone",
    "prepare",
    "register_strategy",
    "wait_for_nodes",
]
