"""Every strategy by the name it has on the command line."""

from .centralized import Centralized
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedprox import FedProx
from .fixbn import FixBN
from .silobn import SiloBN
from .standalone import Standalone

REGISTRY: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fixbn": FixBN,
    "fedbn": FedBN,
    "silobn": SiloBN,
    "standalone": Standalone,
    "centralized": Centralized,
}
