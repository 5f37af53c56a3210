"""A decorated, message-based ClientApp around `BNClient`: names and dtypes of arrays survive the
journey.

Its base, `NodeApp`, is what happens to a message before a handler sees it, and to a reply before it
leaves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.client.own_loop_client import OwnLoopClient
from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.clientapp.mods import ClientAppCallable, Mod, is_outermost
from fedbn_flwr.layerwise.shared_statistics import UnlikeBatchNormError
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state.records import array_records
from fedbn_flwr.transports.message_client import handle_layerwise_message
from fedbn_flwr.transports.message_records import SIDE_CHANNEL
from fedbn_flwr.transports.side_channel_client import answer_by_channel
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.packed import PACKED, pack, unpack, with_content

T = TypeVar("T")

#: makes the client of a node from its Context, for each message
ClientFunction = Callable[[Context], BNClient]


class NodeApp(ClientApp):
    """Flower's ClientApp, which unpacks and packs arrays, and ends with one line where bad input is
    met.

    Mods that are `outermost` see every message, also those that no handler does, and what was
    remembered until the end.
    """

    def __init__(self, client_fn: Any = None, mods: Sequence[Mod] | None = None) -> None:
        self._outer = [mod for mod in mods or () if is_outermost(mod)]
        super().__init__(client_fn, [mod for mod in mods or () if not is_outermost(mod)])

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        handle: ClientAppCallable = self._answer
        for mod in reversed(self._outer):
            handle = _around(handle, mod)
        packed = PACKED in message.content
        received = message
        if packed:
            received = with_content(message, unpack(message.content))
        try:
            reply = handle(received, context)
        except (UsageError, UnlikeBatchNormError) as error:
            # in one line: Flower would show a traceback
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message
            )
        if packed and reply.has_content():
            return with_content(reply, pack(reply.content))
        return reply

    def _answer(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == wire.LAYERWISE and SIDE_CHANNEL in message.content:
            return answer_by_channel(message, context, super().__call__)
        return super().__call__(message, context)


class BNClientApp(NodeApp):
    """A ClientApp that also says how its clients are made, for engines that let several of them
    train at once.
    """

    def __init__(self, client_fn: ClientFunction, mods: list[Mod] | None = None) -> None:
        super().__init__(mods=mods)
        self.client_fn = client_fn
        #: whether nothing but the client sees a message, so that an engine may hand it to the
        #: client
        self.is_plain = not mods


def client_app(
    client_fn: ClientFunction, mods: list[Mod] | None = None, max_steps: int = 0
) -> ClientApp:
    """Make a ClientApp; `client_fn` builds the node's client from its Context, once a message.

    The client's `memory` should be the context's `state`, which Flower keeps from message to
    message. `mods` are Flower's, such as `keep_states`. `max_steps` is the number of layer-wise
    steps that fit into the process' memory.
    """
    app = BNClientApp(client_fn, mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = client_fn(context)
        return answer(client, client.train, message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = client_fn(context)
        return answer(client, client.test, message)

    @app.train("gather")
    def gather(message: Message, context: Context) -> Message:
        return make_message(client_fn(context).gather(*read_message(message)), message)

    @app.train("layerwise")
    def layerwise(message: Message, context: Context) -> Message:
        return make_message(
            handle_layerwise_message(message.content, context, client_fn, max_steps), message
        )

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        return make_message(client_fn(context).describe(), message)

    return app


def answer(
    client: BNClient | OwnLoopClient,
    act: Callable[[Mapping[str, state.State], Instruction], Reply],
    message: Message,
    flowers: bool = True,
) -> Message:
    """Let a client act; one that has lost entries of the model that stay on it asks for the whole
    model instead.
    """
    received, instruction = read_message(message, flowers=flowers)
    local = state.group_keys(client.model, instruction.stays)
    has_all = local <= {*received[wire.ARRAYS], *client.memory.personal(local)}
    if has_all:
        reply = act(received, instruction)
    else:
        reply = Reply(0, {}, report={wire.LACKS_STATE: True})
    return make_message(reply, message)


class SharedRecords:
    """Records that many messages share, each read once; by the record's id, which is another's when
    it is gone.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, Any]] = {}

    def read(self, record: T, reading: Callable[[T], Any]) -> Any:
        """Return what a record holds, as it is read first."""
        if id(record) not in self._known:
            self._known[id(record)] = record, reading(record)
        return self._known[id(record)][1]


def read_message(
    message: Message, known: SharedRecords | None = None, flowers: bool = True
) -> tuple[dict[str, state.State], Instruction]:
    """Return the arrays by group and name, and the instruction, which may be that of Flower's own
    FedProx.

    The arrays are the receiver's own; with `known` they are lent, a record that many messages share
    once for all.
    """
    arrays_name, config_name = wire.record_names(message.content)
    named = {
        wire.ARRAYS if name == arrays_name else name: it
        for name, it in array_records(message.content).items()
    }
    config: Any = message.content[config_name]
    if known is None:
        return {
            name: state.from_record(record) for name, record in named.items()
        }, read_instruction(config, flowers)
    records = {name: known.read(record, state.view_record) for name, record in named.items()}
    return records, known.read(config, read_instruction)


def make_message(reply: Reply, message: Message, copy: bool = True) -> Message:
    """Answer a message. With `copy=False` the message shares the reply's memory, which nobody may
    change any more.
    """
    content = RecordDict(
        {name: state.to_record(values, copy=copy) for name, values in reply.records.items()}
    )
    if reply.num_examples is None:
        counted = {}
    else:
        counted = {wire.NUM_EXAMPLES: reply.num_examples}
    content[wire.METRICS] = MetricRecord({**counted, **_without_empty(reply.metrics)})
    content[wire.REPORT] = ConfigRecord(_without_empty(reply.report))
    return Message(content, reply_to=message)


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out empty lists, whose bytes Flower cannot count."""
    return {key: value for key, value in values.items() if value != []}


def _around(handle: ClientAppCallable, mod: Mod) -> ClientAppCallable:
    return lambda message, context: mod(message, context, handle)
