"""The client's side of a layer-wise step over Flower's messages: kept in memory, or replayed from what was noted."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import Context, RecordDict
from torch import Tensor, nn

from fedbn_flwr import wire
from fedbn_flwr.client.bn_client import BNClient, Reply, layerwise_mode
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.client.step_log import Notes
from fedbn_flwr.layerwise import Answer, Corrected, Exchange, Mode, OwnRandomness, Request, StepStore, SuspendedStep
from fedbn_flwr.norm import bn_layers
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire import layerwise as turns
from fedbn_flwr.wire.layerwise import Turn

#: the suspended steps of this process, at most one a node; a module's, because Flower may build a ClientApp anew for
#: every message
STEPS = StepStore(max_steps=32)

ClientFunction = Callable[[Context], BNClient]


def take_turn(content: RecordDict, context: Context, make_client: ClientFunction) -> Reply:
    """Answer one message of a layer-wise step."""
    turn = Turn.of(content)
    config: Any = content[wire.CONFIG]
    # the fields alone: to make the client may import the module that registers a rule
    instruction = Instruction.from_config(config)
    notes = Notes(Memory(context.state), f"{instruction.server_round}.{turn.attempt}")
    node = context.run_id, context.node_id
    held = _held(node, (notes.place, turn.index - 1))
    if turn.phase == "abandon":
        notes.clear()
        return Reply(0, {})
    notes.add(content, instruction.replay_limit)
    if turn.phase != "exchange":
        return _sweep(turn, content, notes, partial(make_client, context))
    if held is None:
        received, log = notes.received(content), notes.answers(turn.index)
        if received is None or log is None:
            return _lacking()
        held = HeldStep(make_client(context), received, read_instruction(config), log)
        outcome = held.advance()
    else:
        held.client.memory.attach(context.state)
        outcome = held.advance(turns.read_answers(content, turns.ANSWERS)[str(turn.index - 1)])
    if not isinstance(outcome, Request):
        held.release()
        notes.clear()
        return outcome.result
    held.place = notes.place, turn.index
    STEPS.keep(node, held)
    return say(held.client.reply({}, read_instruction(config), {}), [outcome])


def _held(node: tuple[int, int], place: tuple[str, int]) -> "HeldStep | None":
    """The node's step, if it waits at this place; one that waits elsewhere is of no use any more."""
    step = STEPS.take(node)
    if isinstance(step, HeldStep) and step.place == place:
        return step
    if step is not None:
        step.abandon()
    return None


class HeldStep(SuspendedStep[Reply]):
    """A client's whole local training, which stops at each exchange of its layer-wise step."""

    def __init__(
        self, client: BNClient, received: Mapping[str, State], instruction: Instruction, log: list[Answer]
    ) -> None:
        # the steps of several clients take turns, and these may share a model
        self._shared, client.model = client.model, _REPLICAS.take(client.model)
        self.client = client
        #: round and attempt, and the number of the answer that it waits for
        self.place = "", 0
        super().__init__(partial(_train, client, received, instruction), client.step_seed(instruction), log)

    def release(self) -> None:
        """At the end, let another step have the model."""
        _REPLICAS.give_back(self._shared, self.client.model)


def _train(client: BNClient, received: Mapping[str, State], instruction: Instruction, exchange: Exchange) -> Reply:
    client.exchange = foreseeing = Foreseeing(client.model, layerwise_mode(instruction), exchange)
    try:
        return client.train(received, instruction)
    finally:
        foreseeing.close()


class Replicas:
    """Copies of models, to be used again: to make one takes as long as several messages."""

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

    def take(self, model: nn.Module) -> nn.Module:
        """A copy that nobody else uses, in any state."""
        free = self._free.get(model)
        return free.pop() if free else copy.deepcopy(model)

    def give_back(self, model: nn.Module, replica: nn.Module) -> None:
        """It is not used any more, and has no hooks."""
        self._free.setdefault(model, []).append(replica)


_REPLICAS = Replicas()


@dataclass(frozen=True)
class LastRequest(Request):
    """The request after which a step will ask no more, as far as can be foreseen."""


class Foreseeing:
    """An exchange that foresees its last request, so that the server knows which answer brings the models.

    The last one is about gradients, and there is one for each use of a layer whose inputs depend on parameters. Where
    gradients are not exchanged, it is taken to be the one after which every layer was used once.
    """

    def __init__(self, model: nn.Module, mode: Mode, exchange: Exchange) -> None:
        self._exchange, self._kind = exchange, "statistics" if mode == "forward" else "gradients"
        layers = [layer for layer in bn_layers(model).values() if layer.training or layer.running_mean is None]
        self._left = len(layers) if mode == "forward" else 0
        counted = [] if mode == "forward" else layers
        self._hooks = [layer.register_forward_pre_hook(self._count) for layer in counted]

    def _count(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._left += inputs[0].requires_grad

    def __call__(self, request: Request) -> Answer:
        """Pass on, the last one marked."""
        if request.kind == self._kind:
            self._left -= 1
            if self._left == 0:
                request = LastRequest(**vars(request))
        return self._exchange(request)

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()


def _sweep(turn: Turn, content: RecordDict, notes: Notes, make_client: Callable[[], BNClient]) -> Reply:
    """A sweep, or the step after the sweeps: nothing is held, because the corrections come with every message."""
    received = notes.received(content)
    if received is None:
        return _lacking()
    client = make_client()
    config: Any = content[wire.CONFIG]
    instruction = read_instruction(config)
    statistics, gradients = (turns.read_answers(content, group) for group in turns.CORRECTIONS)
    if turn.phase == "step":
        notes.clear()
        client.exchange = Corrected(statistics, gradients)
        with OwnRandomness(client.step_seed(instruction)).drawing():
            return client.train(received, instruction)
    said = client.sweep(received, instruction, statistics, gradients if turn.phase == "backward" else None)
    return say(client.reply({}, instruction, {}), list(said.values()))


def say(reply: Reply, requests: Sequence[Request]) -> Reply:
    """Put into a client's reply what it says of its layers."""
    last = any(isinstance(request, LastRequest) for request in requests)
    reply.records[turns.SAID] = {request.layer: request.tensor for request in requests}
    reply.report |= turns.report(requests, last)
    return reply


def _lacking() -> Reply:
    return Reply(0, {}, report={turns.LACKS_ARRAYS: True})
