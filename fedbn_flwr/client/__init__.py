"""The Flower client: local training, the rules that methods add to it, layer-wise steps, evaluation."""

from fedbn_flwr.client.bn_client import BNClient, pick_device
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.client.rules import Rule, Session, read_instruction, register_rule

__all__ = [
    "BNClient",
    "Reply",
    "Rule",
    "Session",
    "pick_device",
    "read_instruction",
    "register_rule",
]
