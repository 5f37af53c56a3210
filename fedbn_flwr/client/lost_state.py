"""A node that has lost the entries of the model that stay on it: it says so, and is sent the whole model."""

from collections.abc import Mapping

from fedbn_flwr import state, wire
from fedbn_flwr.client.bn_client import BNClient
from fedbn_flwr.client.own_loop_client import OwnLoopClient
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction


def has_all(client: BNClient | OwnLoopClient, received: Mapping[str, State], instruction: Instruction) -> bool:
    """Return whether the client received, or remembers, every entry that the instruction keeps on it."""
    local = state.group_keys(client.model, instruction.keep_local)
    return local <= {*received[wire.ARRAYS], *client.memory.personal(local)}


def lacking_reply() -> Reply:
    """Return the reply of a node that asks for the whole model."""
    return Reply(0, {}, report={wire.LACKS_STATE: True})
