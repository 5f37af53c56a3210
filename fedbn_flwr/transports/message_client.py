"""The nodes' end of a layer-wise step by messages.

Between two messages a step waits in this process (`SuspendedStep`), and catches up if other
processes had messages in between. Where none waits, it is replayed from what the node has kept
(`StepLog`). The server's end is in `message_server.py`, the records of the messages in
`message_records.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr import state, wire
from fedbn_flwr.client.bn_client import BNClient
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.own_loop_client import OwnLoopClient
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.layerwise import Answer, Exchange, Requests, SuspendedStep
from fedbn_flwr.layerwise.steps import Replicas
from fedbn_flwr.state import State
from fedbn_flwr.state.records import payload_bytes
from fedbn_flwr.transports.message_records import (
    ANSWERS,
    COUNTS,
    LACKS_ARRAYS,
    REQUEST,
    StepPosition,
    read_answers,
)
from fedbn_flwr.wire import Instruction

#: most steps that wait in this process, where nobody says that there is room for more
MAX_STEPS = 32
#: most bytes of received arrays that a node keeps in its state to replay a step; it asks for larger
#: ones again
REPLAY_LIMIT = 16 * 2**20
_REPLICAS = Replicas()
_PREFIX = "layerwise/"

#: what takes layer-wise steps: this project's client, or one around a handler of a user's own
LayerwiseClient = BNClient | OwnLoopClient


@dataclass
class HeldStep:
    """A client's whole local training, which waits in this process for the answer to an
    exchange.
    """

    client: LayerwiseClient
    step: SuspendedStep[Reply]
    #: round and attempt, and the number of the answer that the step waits for
    place: tuple[str, int] = "", 0


#: by run and node, the steps of this process; of the module, because Flower may make a ClientApp
#: for every message
STEPS: dict[tuple[int, int], HeldStep] = {}


def allow_steps(number: int) -> None:
    """Let at least so many steps wait in this process."""
    global MAX_STEPS
    MAX_STEPS = max(MAX_STEPS, number)


def handle_layerwise_message(
    content: RecordDict,
    context: Context,
    make_client: Callable[[Context], LayerwiseClient],
    max_steps: int = 0,
) -> Reply:
    """Answer a message of a layer-wise step: with the client's next request, and at the end of the
    step with its model.

    The run's steps of earlier rounds and attempts end: a server that gives a step up says nothing.
    As many steps as `max_steps` may wait in this process, if that is above `MAX_STEPS`.
    """
    position = StepPosition.of(content)
    config: Any = content[wire.CONFIG]
    # to make the client may import the module that registers a rule: until then, fields alone
    server_round = Instruction.from_config(config).server_round
    step_log = StepLog(Memory(context.state), f"{server_round}.{position.attempt}")
    for key in [
        key
        for key, other in STEPS.items()
        if key[0] == context.run_id and other.place[0] != step_log.attempt
    ]:
        STEPS.pop(key, None)  # a step that nobody holds ends
    held = STEPS.pop(_key(context), None)
    if held is not None and held.place[1] >= position.index:
        held = None
    step_log.add(content)
    # the message brings the answer before its index, and another process may have had the messages
    # before this one
    first = held.place[1] if held else 0
    if held and first == position.index - 1:
        known = read_answers(content)
    else:
        known = step_log.answers()
    numbers = [str(number) for number in range(first, position.index)]
    received = {} if held else step_log.received(content)
    if received is None or not known.keys() >= set(numbers):
        return Reply(0, {}, report={LACKS_ARRAYS: True})
    if held is not None:
        held.client.memory.attach(context.state)
    else:
        client = make_client(context)
        instruction = read_instruction(config)
        step = partial(_train, client, received, instruction)
        held = HeldStep(client, SuspendedStep(step, client.step_seed(instruction)))
        outcome = held.step.advance()
    for number in numbers:
        outcome = held.step.advance(known[number])
    if not isinstance(outcome, Requests):
        step_log.clear()
        return outcome.result
    # without room the new step ends: clients take turns, and without the oldest, none would have
    # its step next time
    if len(STEPS) < max(MAX_STEPS, max_steps):
        held.place = step_log.attempt, position.index
        STEPS[_key(context)] = held
    reply = held.client.reply(
        {}, read_instruction(config), {REQUEST: {outcome.layer: outcome.tensor[0]}}
    )
    reply.report |= {"kind": outcome.kind, "count": outcome.counts[0]}
    return reply


def holds_step(context: Context) -> bool:
    """Return whether a step of the node waits in this process."""
    return _key(context) in STEPS


def _key(context: Context) -> tuple[int, int]:
    return context.run_id, context.node_id


def _train(
    client: LayerwiseClient,
    received: Mapping[str, State],
    instruction: Instruction,
    exchange: Exchange,
) -> Reply:
    """Let a client train on a copy of its model: the steps of several clients alternate, and these
    may share one.
    """
    shared = client.model
    client.model = _REPLICAS.take(client.model)
    reply = client.train(received, instruction, exchange)
    _REPLICAS.give_back(shared, client.model)
    return reply


class StepLog:
    """The arrays and answers that a node has received in one attempt at a step; they are in its
    `Context.state`.

    `attempt` names the round and the attempt. More than `REPLAY_LIMIT` bytes of arrays are not
    kept.
    """

    def __init__(self, memory: Memory, attempt: str) -> None:
        self._memory = memory
        self.attempt = attempt
        self._received = f"{_PREFIX}{attempt}/received/"
        self._answers = f"{_PREFIX}{attempt}/log/"

    def add(self, content: RecordDict) -> None:
        """Keep the arrays and answers of a message.

        Arrays begin a new step, so everything before is forgotten.
        """
        received = _received(content)
        if received:
            self.clear()
            size = sum(
                payload_bytes(array) for record in received.values() for array in record.values()
            )
            if size <= REPLAY_LIMIT:
                for name, record in received.items():
                    self._memory.keep(f"{self._received}{name}", record)
        kept: dict[str, Any] = dict(self._memory.kept(self._answers))
        for group in (ANSWERS, COUNTS):
            new: Any = content.get(group)
            if group in kept and new:
                kept[group].update(new)
            elif new:
                # a copy: the messages to all nodes may share their records
                self._memory.keep(f"{self._answers}{group}", new.copy())

    def received(self, content: RecordDict) -> dict[str, State] | None:
        """Return the groups of arrays that the step starts from, of this message or kept; None if
        there are none.
        """
        records = _received(content) or dict(self._memory.kept(self._received))
        return {name: state.from_record(record) for name, record in records.items()} or None

    def answers(self) -> dict[str, Answer]:
        """Return the answers by their numbers, of which some may be missing."""
        return read_answers(dict(self._memory.kept(self._answers)))

    def clear(self) -> None:
        """Forget the step."""
        self._memory.forget(_PREFIX)


def _received(content: RecordDict) -> dict[str, Any]:
    """Return a message's groups of arrays, as plain training has them; none if it does not bring
    arrays.
    """
    if wire.ARRAYS not in content:
        return {}
    return {name: record for name, record in content.array_records.items() if name != ANSWERS}
