"""What a `BNClient` does, done by a handler that somebody else wrote."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from flwr.app import Context, Message, RecordDict
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client.bn_client import model_names
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.own_loop import OwnLoop, saying_training_mode
from fedbn_flwr.client.passes import Pass, make_pass, parts_of
from fedbn_flwr.client.reply import Metrics, Reply
from fedbn_flwr.client.rules import obeyed_keys
from fedbn_flwr.client.training import require_bn
from fedbn_flwr.device import pick_device
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.randomness import OwnRandomness, derive, seed_unused
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.packed import with_content

Handler = Callable[[Message, Context], Message]

#: batches of a node's training data
TrainingData = Callable[[Message, Context], Iterable[Any]]

NO_DATA = (
    "the strategy runs the model over the nodes' training data without training: register a "
    "function that returns them, in batches of inputs and labels, with @app.training_data()"
)


class OwnLoopClient:
    """A client whose training is a handler for Flower's messages.

    The message brings what the handler will see.
    """

    def __init__(
        self,
        structure: nn.Module,
        handler: Handler,
        message: Message,
        context: Context,
        num_examples: int | None = None,
        loss_key: str = wire.TRAIN_LOSS,
        training_data: TrainingData | None = None,
    ) -> None:
        #: says which entries there are; the handler makes and trains a model of its own
        self.model = structure
        self._handler = handler
        self._message = message
        self._context = context
        self._training_data = training_data
        self._num_examples = num_examples
        self._loss_key = loss_key
        self.memory = Memory(context.state)
        self.partition_id = int(context.node_config.get("partition-id", context.node_id))
        self._loop: OwnLoop | None = None

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        """Let the handler train for one round, as `BNClient.train` does."""
        if "gather" in instruction.later.split(",") and not self._training_data:
            raise ValueError(NO_DATA)
        drawing = (
            nullcontext() if exchange else OwnRandomness(self.step_seed(instruction)).drawing()
        )
        loop = OwnLoop(self.model, instruction, received, self.memory, exchange)
        with drawing, loop as self._loop:
            seed_unused()
            content = self._answer(received, instruction)
        # in a layer-wise step the handler has the context of the first message, and the last one's
        # is kept
        self.memory.adopt(self._context.state)
        return self._reply_after(loop, content, instruction)

    def _reply_after(self, loop: OwnLoop, content: RecordDict, instruction: Instruction) -> Reply:
        """Make the reply of a round from a handler's: what the instruction shares, and what rules
        add.
        """
        trained = self._trained(content)
        loop.refuse_another(trained)
        stays = state.group_keys(self.model, instruction.stays)
        if stays:
            self.memory.store(
                wire.STAYS, {name: trained[name] for name in trained if name in stays}
            )
        unsent = stays | state.group_keys(self.model, instruction.omit)
        shared = {name: value for name, value in trained.items() if name not in unsent}
        reply = self._reply_of(content, instruction, {wire.ARRAYS: shared, **loop.records})
        reply.metrics |= loop.metrics
        if instruction.report_loss and instruction.report_loss not in reply.metrics:
            raise ValueError(
                "the strategy asks for a loss on all local data, and the handler's metrics lack "
                f"{instruction.report_loss!r}; they are {', '.join(sorted(reply.metrics))} "
                "(FedBS takes the mean training loss with loss='running')"
            )
        if self._loss_key in reply.metrics:
            reply.metrics[wire.TRAIN_LOSS] = reply.metrics[self._loss_key]
        return reply

    def test(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
        """Let the handler evaluate the node's own model: the received one with the entries that
        live here.
        """
        if instruction.gather:
            made = make_pass(self.model, instruction, received)
            self._run(made, received, instruction)
            own = made.own_entries()
            stays = self.memory.personal(state.group_keys(self.model, instruction.stays))
            self.memory.store(wire.STAYS, {**stays, **own})
            received = {**received, wire.ARRAYS: {**received[wire.ARRAYS], **own}}
        with saying_training_mode():
            content = self._answer(received, instruction)
        kept = self.memory.personal(
            state.group_keys(self.model, instruction.stays if instruction.send_personal else "none")
        )
        return self._reply_of(content, instruction, {wire.STAYS: kept})

    def _answer(self, received: Mapping[str, State], instruction: Instruction) -> RecordDict:
        """Return the content of the handler's reply."""
        reply = self._handler(self._seen(received, instruction), self._context)
        if not isinstance(reply, Message):
            raise TypeError(f"the handler must return a Message, not {type(reply).__name__}")
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        return reply.content

    def gather(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
        """Reply with what a pass of the received model over this node's data adds up, without
        training.
        """
        made = make_pass(self.model, instruction, received)
        samples = self._run(made, received, instruction)
        report = {wire.OBEYED: obeyed_keys(instruction)}
        metrics: Metrics = {wire.PARTITION_ID: self.partition_id}
        return Reply(samples, metrics, {wire.MOMENTS: made.found()}, report)

    def _run(self, made: Pass, received: Mapping[str, State], instruction: Instruction) -> int:
        """Run a pass over the node's training data; return the number of samples."""
        if not self._training_data:
            raise ValueError(NO_DATA)
        message = self._seen(received, instruction)
        arrays, _ = wire.record_names(message.content)
        device = pick_device("auto")
        state.load(self.model, state.from_record(message.content.array_records[arrays]))
        self.model.to(device)
        with OwnRandomness(self.step_seed(instruction)).drawing():
            seed_unused()
            given = self._training_data(message, self._context)
            return made.run(parts_of(batch, device) for batch in given)

    def describe(self) -> Reply:
        """Reply with the node's partition and the names of the model's entries."""
        metrics: Metrics = {wire.DOMAIN: -1, wire.PARTITION_ID: self.partition_id}
        return Reply(
            -1 if self._num_examples is None else self._num_examples,
            metrics,
            report=model_names(self.model),
        )

    def step_seed(self, instruction: Instruction) -> int:
        """Return the seed of what the handler draws from torch's global generator in this round."""
        return derive(
            instruction.seed,
            "own loop",
            "round",
            instruction.server_round,
            "partition",
            self.partition_id,
        )

    def reply(
        self, metrics: Metrics, instruction: Instruction, records: Mapping[str, State]
    ) -> Reply:
        """Make a reply in the middle of a layer-wise step, before the handler has told its number
        of examples.
        """
        assert self._loop is not None
        if self._num_examples is None:
            count = self._loop.first_batch_size
        else:
            count = self._num_examples
        metrics[wire.PARTITION_ID] = self.partition_id
        return Reply(count, metrics, dict(records), {wire.OBEYED: obeyed_keys(instruction)})

    def _seen(self, received: Mapping[str, State], instruction: Instruction) -> Message:
        """Return the message that Flower's FedAvg would have sent: the whole model, and the
        configuration.
        """
        personal = self.memory.personal(state.group_keys(self.model, instruction.stays))
        whole = {**received[wire.ARRAYS], **personal}
        # a model that `prepare` has not made may be why
        if whole.keys() != self.model.state_dict().keys():
            require_bn(self.model, instruction)
        state.check_fit(self.model, whole)
        # the message of an exchange brings no model: the first one did
        by_exchanges = instruction.layerwise != "none"
        arrays, config = (
            (wire.ARRAYS, wire.CONFIG) if by_exchanges else wire.record_names(self._message.content)
        )
        content = RecordDict(
            {
                arrays: state.to_record({name: whole[name] for name in self.model.state_dict()}),
                config: self._message.content[config],
            }
        )
        return with_content(self._message, content)

    def _trained(self, content: RecordDict) -> State:
        """Return the arrays of the handler's reply, which must be those of the model."""
        if len(content.array_records) != 1:
            raise ValueError(
                f"the handler replied with {len(content.array_records)} ArrayRecords; it must be "
                "one"
            )
        (record,) = content.array_records.values()
        trained = state.from_record(record)
        state.check_fit(self.model, trained)
        return trained

    def _reply_of(
        self, content: RecordDict, instruction: Instruction, records: Mapping[str, State]
    ) -> Reply:
        # what the strategy weighs by is the server's to ask for: `weighted_by_key` may be any of
        # these
        metrics: dict[str, Any] = {
            key: value
            for record in content.metric_records.values()
            for key, value in record.items()
        }
        metrics[wire.PARTITION_ID] = self.partition_id
        report = {
            key: value
            for record in content.config_records.values()
            for key, value in record.items()
        }
        return Reply(
            None, metrics, dict(records), {**report, wire.OBEYED: obeyed_keys(instruction)}
        )
