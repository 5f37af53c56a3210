"""Obey an instruction in a handler of Flower's own ClientApp, where the training is written out."""

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
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

    def reply(self, *, num_examples: int, train_loss: float | None = None, **metrics: float) -> Message:
        """Answer the message, with the model if it was to be trained; call this after the block.

        Underscores in the names of metrics become hyphens on the wire.
        """
        losses = {} if train_loss is None else {wire.TRAIN_LOSS: train_loss}
        numbers = {wire.NUM_EXAMPLES: num_examples, **losses, **{wire.wire_key(key): metrics[key] for key in metrics}}
        content = RecordDict({wire.METRICS: MetricRecord(dict(numbers))})
        if self._message.metadata.message_type.partition(".")[0] == MessageType.EVALUATE:
            return pack(self._client.reply_after_test(content, self.instruction), self._message)
        content[wire.ARRAYS] = ArrayRecord(self._client.model.state_dict())
        return pack(self._client.reply_after(self._loop, content, self.instruction), self._message)


@contextmanager
def obey(model: nn.Module, message: Message, context: Context) -> Iterator[Asked]:
    """Load the message's arrays into a model, and let the loop inside the block train it as the message asks.

        with obey(model, message, context) as asked:
            ...                                             # the loop
        return asked.reply(num_examples=n, train_loss=loss)

    In an evaluation handler the model is the node's own, and `asked.reply(num_examples=n, eval_loss=loss)` the answer.
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
