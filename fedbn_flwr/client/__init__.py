"""The Flower client: local training, the rules that methods add to it, layer-wise steps, evaluation."""

from fedbn_flwr.client.bn_client import BNClient
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.client.rules import Rule, Session, read_instruction, register_rule
from fedbn_flwr.device import pick_device

__all__ = [
    "BNClient",
    "Reply",
    "Rule",
    "Session",
    "pick_device",
    "read_instruction",
    "register_rule",
]
