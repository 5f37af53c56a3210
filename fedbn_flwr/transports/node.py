"""A node's door for the messages of layer-wise steps, whichever transport they belong to."""

from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.transports.message_client import ClientFunction, StepLog, forget_step, take_exchange
from fedbn_flwr.transports.message_records import SIDE_CHANNEL, StepPosition
from fedbn_flwr.transports.stream_node import step_over_stream
from fedbn_flwr.wire import Instruction


def handle_layerwise_message(content: RecordDict, context: Context, make_client: ClientFunction) -> Reply:
    """Answer one message of a layer-wise step: with the client's next request, or at the end with its model."""
    position, config = StepPosition.of(content), _config(content)
    log = StepLog(Memory(context.state), f"{config.server_round}.{position.attempt}", config.replay_limit)
    match position.phase:
        case "abandon":
            return forget_step(context, log)
        case "exchange" if SIDE_CHANNEL not in content:
            return take_exchange(content, context, make_client, position, log)
        case _:
            log.clear()
            return step_over_stream(content, context, make_client)


def _config(content: RecordDict) -> Instruction:
    """Return the fields of the instruction alone: to make the client may import the module that registers a rule."""
    config: Any = content[wire.CONFIG]
    return Instruction.from_config(config)
