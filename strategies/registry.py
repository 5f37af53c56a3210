"""Every strategy by the name it has on the command line."""

from .centralized import Centralized
from .fedavg import FedAvg
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
from .scaffold import Scaffold
from .silobn import SiloBN
from .standalone import Standalone

REGISTRY: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fixbn": FixBN,
    "fedtan": FedTAN,
    "feddna": FedDNA,
    "fedtan-ii": FedTANII,
    "fedbs": FedBS,
    "fedwon": FedWon,
    "fedbn": FedBN,
    "silobn": SiloBN,
    "mtfl": MTFL,
    "fednorm": FedNorm,
    "scaffold": Scaffold,
    "heterofl": HeteroFL,
    "hbn": HBN,
    "standalone": Standalone,
    "centralized": Centralized,
}
