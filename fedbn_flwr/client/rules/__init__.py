"""What a method adds to local training: one rule a file, switched on by an instruction key."""

from fedbn_flwr.client.rules.base import Rule, Session
from fedbn_flwr.client.rules.fedprox import Proximal
from fedbn_flwr.client.rules.gradient_clipping import Clipping
from fedbn_flwr.client.rules.kept_momentum import MaintainedMomentum
from fedbn_flwr.client.rules.scaffold import ControlVariates
from fedbn_flwr.client.rules.statistics_change import StatisticsChange
from fedbn_flwr.wire import Instruction

__all__ = ["Rule", "Session", "rules_for"]


def rules_for(instruction: Instruction) -> list[Rule]:
    """The rules in force; they change gradients in this order, so that clipping sees what the step will take."""
    switches: list[tuple[bool, type[Rule]]] = [
        (instruction.momentum_state != "none", MaintainedMomentum),
        (instruction.report_change, StatisticsChange),
        (instruction.proximal_mu != 0, Proximal),
        (instruction.control_variates, ControlVariates),
        (instruction.clip_factor != 0, Clipping),
    ]
    return [rule() for wanted, rule in switches if wanted]
