"""The Flower client: local training, the rules that methods add to it, layer-wise steps,
evaluation.
"""

from fedbn_flwr.client.bn_client import BNClient
from fedbn_flwr.client.learning_task import LearningTask, register_task
from fedbn_flwr.client.passes import Pass, register_pass
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.client.rules import Rule, Session, register_rule

__all__ = [
    "BNClient",
    "LearningTask",
    "Pass",
    "Reply",
    "Rule",
    "Session",
    "register_pass",
    "register_rule",
    "register_task",
]
