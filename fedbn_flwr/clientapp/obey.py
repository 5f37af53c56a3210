"""Obey an instruction in a handler of Flower's own ClientApp, where the training is written out."""

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client.own_loop import OwnLoop
from fedbn_flwr.client.own_loop_client import OwnLoopClient
from fedbn_flwr.clientapp.bn_client_app import pack, unpack
from fedbn_flwr.layerwise import OwnRandomness
from fedbn_flwr.wire import Instruction


class Asked:
    """What a message asks for: the configuration, the instruction, and the reply once the model has been trained."""

    def __init__(self, client: OwnLoopClient, loop: OwnLoop, instruction: Instruction, message: Message) -> None:
        self._client, self._loop, self._message = client, loop, message
        self.instruction = instruction
        #: the strategy's configuration, a user's own keys included
        self.config: ConfigRecord = message.content.config_records[wire.record_names(message.content)[1]]

    def reply(self, *, num_examples: int, train_loss: float, **metrics: float) -> Message:
        """Answer the message with the trained model; call it after the block."""
        numbers: dict[str, float] = {wire.NUM_EXAMPLES: num_examples, wire.TRAIN_LOSS: train_loss, **metrics}
        arrays = ArrayRecord(self._client.model.state_dict())
        content = RecordDict({wire.ARRAYS: arrays, wire.METRICS: MetricRecord(dict(numbers))})
        return pack(self._client.reply_after(self._loop, content, self.instruction), self._message)


@contextmanager
def obey(model: nn.Module, message: Message, context: Context) -> Iterator[Asked]:
    """Load the message's arrays into a model, and let the loop inside the block train it as the message asks.

        with obey(model, message, context) as asked:
            ...                                             # the loop
        return asked.reply(num_examples=n, train_loss=loss)

    Layer-wise steps take several messages, and need the `ClientApp` of this package.
    """
    received, instruction = unpack(message, flowers=False)
    client = OwnLoopClient(model, _no_handler, message, context)
    personal = client.memory.personal(state.group_keys(model, instruction.keep_local))
    state.load(model, {**received[wire.ARRAYS], **personal})
    loop = OwnLoop(model, instruction, received, client.memory)
    with OwnRandomness(client.step_seed(instruction)).drawing(), loop:
        loop.begin(model)
        yield Asked(client, loop, instruction, message)


def _no_handler(message: Message, context: Context) -> Message:
    raise NotImplementedError("the loop is inside the block of `obey`")
