"""The client's half of a layer-wise step over Flower's messages.

Between two messages a step waits in this process (`HeldStep`), or is replayed from what the node has kept (`StepLog`).
The server's half is `fedbn_flwr.server.message_step`.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import Context, RecordDict
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client.bn_client import BNClient
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.own_loop_client import OwnLoopClient
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.client.side_channel import AttemptOverError, SideChannelExchange, UnreachableError
from fedbn_flwr.client.step_log import StepLog
from fedbn_flwr.layerwise import Answer, Exchange, OwnRandomness, Requests, StepCache, SuspendedStep
from fedbn_flwr.state import State
from fedbn_flwr.state.records import array_records
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.layerwise import (
    ADDRESS,
    LACKS_ARRAYS,
    OVER,
    REQUEST,
    SIDE_CHANNEL,
    TOKEN,
    UNREACHABLE,
    StepPosition,
    read_answers,
    request_report,
)

#: the suspended steps of this process, at most one a node; of the module, because Flower may make a ClientApp for every
#: message
STEPS = StepCache(max_steps=32)

#: what takes layer-wise steps: this project's client, or one around a handler of a user's own
LayerwiseClient = BNClient | OwnLoopClient
ClientFunction = Callable[[Context], LayerwiseClient]


def handle_layerwise_message(content: RecordDict, context: Context, make_client: ClientFunction) -> Reply:
    """Answer one message of a layer-wise step: with the client's next request, or at the end with its model."""
    position = StepPosition.of(content)
    config: Any = content[wire.CONFIG]
    # the fields alone: to make the client may import the module that registers a rule
    instruction = Instruction.from_config(config)
    log = StepLog(Memory(context.state), f"{instruction.server_round}.{position.attempt}")
    if SIDE_CHANNEL in content:
        log.clear()
        over_channel = _gather_over_channel if position.phase == "gather" else _step_over_channel
        return over_channel(content, partial(make_client, context))
    node = context.run_id, context.node_id
    held = _take_held(node, (log.attempt, position.index - 1))
    if position.phase == "abandon":
        log.clear()
        return Reply(0, {})
    log.add(content, instruction.replay_limit)
    if held is None:
        received, answers = log.received(content), log.answers(position.index)
        if received is None or answers is None:
            return Reply(0, {}, report={LACKS_ARRAYS: True})
        held = HeldStep(make_client(context), received, read_instruction(config), answers)
        outcome = held.advance()
    else:
        held.client.memory.attach(context.state)
        outcome = held.advance(read_answers(content)[str(position.index - 1)])
    if not isinstance(outcome, Requests):
        held.release()
        log.clear()
        return outcome.result
    held.place = log.attempt, position.index
    STEPS.keep(node, held)
    return add_request(held.client.reply({}, read_instruction(config), {}), outcome)


def _step_over_channel(content: RecordDict, make_client: Callable[[], LayerwiseClient]) -> Reply:
    """Take the whole step, and all other steps of the round, while a side channel is open for the exchanges."""
    config: Any = content[wire.CONFIG]

    def step(exchange: SideChannelExchange) -> Reply:
        client, instruction = make_client(), read_instruction(config)
        _introduce(exchange, client, instruction)
        with OwnRandomness(client.step_seed(instruction)).drawing():
            return _train(client, _received(content), instruction, exchange)

    return _over_channel(content, step)


def _gather_over_channel(content: RecordDict, make_client: Callable[[], LayerwiseClient]) -> Reply:
    """Gather statistics layer by layer, while a side channel is open for the exchanges."""
    config: Any = content[wire.CONFIG]
    client, instruction = make_client(), read_instruction(config)
    if not isinstance(client, BNClient):
        return Reply(0, {}, report={UNREACHABLE: "a client with a loop of its own gathers no statistics"})
    if why := client.why_not_in_order(instruction):
        return Reply(0, {}, report={UNREACHABLE: why})

    def gather(exchange: SideChannelExchange) -> Reply:
        _introduce(exchange, client, instruction)
        reply = client.gather_in_order(_received(content), instruction, exchange)
        exchange.finish()
        return reply

    return _over_channel(content, gather)


def _introduce(exchange: SideChannelExchange, client: LayerwiseClient, instruction: Instruction) -> None:
    """Let requests say whose they are, and how many samples are behind the client."""

    def introduce() -> tuple[int, int]:
        return client.partition_id, client.reply({}, instruction, {}).num_examples or 0

    exchange.introduce = introduce


def _received(content: RecordDict) -> dict[str, State]:
    return {name: state.from_record(arrays) for name, arrays in array_records(content).items()}


def _over_channel(content: RecordDict, act: Callable[[SideChannelExchange], Reply]) -> Reply:
    """Return the reply of what is done while the side channel is open, or why it was not."""
    record: Any = content[SIDE_CHANNEL]
    try:
        with SideChannelExchange(record[ADDRESS], record[TOKEN]) as exchange:
            return act(exchange)
    except UnreachableError as error:
        return Reply(0, {}, report={UNREACHABLE: str(error)})
    except AttemptOverError:
        return Reply(0, {}, report={OVER: True})


def _take_held(node: tuple[int, int], place: tuple[str, int]) -> "HeldStep | None":
    """Return the node's suspended step if it waits at this place; a step that waits elsewhere is abandoned."""
    step = STEPS.take(node)
    if isinstance(step, HeldStep) and step.place == place:
        return step
    if step is not None:
        step.abandon()
    return None


class HeldStep(SuspendedStep[Reply]):
    """A client's whole local training, which stops at each exchange of its layer-wise step."""

    def __init__(
        self, client: LayerwiseClient, received: Mapping[str, State], instruction: Instruction, answers: list[Answer]
    ) -> None:
        # the steps of several clients alternate, and these may share a model
        self._shared, client.model = client.model, _REPLICAS.take(client.model)
        self.client = client
        #: round and attempt, and the number of the answer that the step waits for
        self.place = "", 0
        super().__init__(partial(_train, client, received, instruction), client.step_seed(instruction), answers)

    def release(self) -> None:
        """Let another step have the model, at the end of this one."""
        _REPLICAS.give_back(self._shared, self.client.model)


def _train(
    client: LayerwiseClient, received: Mapping[str, State], instruction: Instruction, exchange: Exchange
) -> Reply:
    client.exchange = exchange
    return client.train(received, instruction)


class Replicas:
    """Copies of models, to be used again: to make one takes as long as several messages."""

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

    def take(self, model: nn.Module) -> nn.Module:
        """Return a copy that nobody else uses, with any values."""
        free = self._free.get(model)
        return free.pop() if free else copy.deepcopy(model)

    def give_back(self, model: nn.Module, replica: nn.Module) -> None:
        """Take back a copy that is not used any more, and has no hooks."""
        self._free.setdefault(model, []).append(replica)


_REPLICAS = Replicas()


def add_request(reply: Reply, request: Requests) -> Reply:
    """Put a client's request into its reply."""
    reply.records[REQUEST] = {request.layer: request.tensor[0]}
    reply.report |= request_report(request)
    return reply
