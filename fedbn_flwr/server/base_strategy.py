"""A round of federated learning on Flower, and the hooks that a method overrides."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from math import isfinite
from typing import Annotated, Any, ClassVar, NoReturn, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedbn_flwr import wire
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.averaging import Arrays, arrays_of, arrays_to_record
from fedbn_flwr.server.constructor_options import MomentumKind, OptimizerKind, check_constructor
from fedbn_flwr.server.kept_state import KeptState, LaterRounds
from fedbn_flwr.server.lr_schedule import read_schedule
from fedbn_flwr.server.optimizers import ServerOptimizer
from fedbn_flwr.server.replies import (
    NOT_OBEYED,
    CannotTrainError,
    DivergedError,
    Expected,
    Group,
    LostRounds,
    NodeReply,
    NotObeyedError,
    Refusal,
    log_refused,
    mean_metrics,
    name_dominant,
    parse_replies,
)
from fedbn_flwr.server.robust import Robust
from fedbn_flwr.server.sampling import Node, Roster, draw, wait_for_nodes
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.pooled import Terms

UNTRAINED = (
    "`result.arrays` has %d entries that stay on the nodes and were not trained (%s): evaluate on the nodes, or use "
    "`export_personal`"
)
WRAPPED = (
    "{} must be started itself, by `start`: a strategy around it, such as Flower's for differential privacy, takes "
    "entries by their positions, also variances and counters; in its place, strategies take `privacy=Privacy(...)`"
)


@dataclass(frozen=True, eq=False)
class Round:
    """A round of training, or of evaluation: what its messages ask of which nodes."""

    number: int = 0
    #: the way to the nodes, which hooks may also ask
    grid: Grid | None = None
    #: the global state that the round starts from
    current: Arrays = field(default_factory=dict)
    #: the user's options, and from `instruct` on the method's orders
    instruction: Instruction = field(default_factory=Instruction)
    #: whether the user's options have a learning rate; without one, clients have their own
    has_rate: bool = True
    #: what messages hold beside the instruction, such as a user's own keys
    other_config: Mapping[str, Any] = field(default_factory=dict)
    #: the nodes that get a message
    nodes: Sequence[int] = ()
    #: the binding keys, and the arrays whose shapes replies must have
    expected: Expected = field(default_factory=lambda: Expected((), {}))


class BaseStrategy(KeptState, FlowerFedAvg):
    """Instruct clients, send them arrays, check their replies and let a method merge them.

    A round is Flower's (`Strategy.start`): `configure_train` makes the messages, the grid takes them to the nodes and
    brings replies, `aggregate_train` makes the new state of them, and the evaluation follows. A method overrides hooks
    and calls `super()`, so that methods can be combined. In `configure_train`:

    - `instruct`: what clients do in this round,
    - `package`: the arrays that a node gets.

    In `aggregate_train`, one after another:

    - `collect`: the replies, here those that the grid brought,
    - `weigh`: how much each reply counts; in `FedAvg` as `terms` says,
    - `merge`: the new global state, made of single replies. In `FedAvg` this is `update(pool(replies, weights))`, and
      a method overrides `update`, which knows nothing of who pooled,
    - `refine`: further changes of the new state, for which nodes can be asked again.

    What a round is, hooks find in `self.round`; `server_round`, `grid`, `current` and `instruction` are parts of it.
    What a method keeps from round to round it names in `kept`, for runs that are resumed (see `KeptState`).

    Takes every argument of Flower's FedAvg, the options that its constructor explains, and

    - `lr_schedule`: the learning rate over the rounds, see `fedbn_flwr.server.lr_schedule`,
    - `seed`: decides which nodes are drawn when not all take part,
    - `patience`: how many seconds to wait for enough nodes before giving up; Flower waits for ever,
    - `exchange_timeout`: how many seconds nodes have to answer within a round, or to describe themselves,
    - `evaluate_every`: how often nodes evaluate, if `fraction_evaluate` asks for it; the last round always counts.
    """

    kept: ClassVar[tuple[str, ...]] = ("ever_trained", "frozen_after", "momentum", "obeyed_before", "server_optimizer")
    #: the paper of the method, what leaves a client, and when to use the method: for lists, in Markdown
    paper: ClassVar[str] = ""
    leaves: ClassVar[str] = ""
    use: ClassVar[str] = ""
    #: whether nodes end up with models of their own, which only they can evaluate
    personal: ClassVar[bool] = False
    #: constructor arguments of a base class that have another name here
    replaced: ClassVar[tuple[str, ...]] = ()
    #: what is pooled beside the model; each class of a hierarchy names only its own
    pools: ClassVar[tuple[Group, ...]] = ()
    #: what a model must have of BN, or the method would be another one; see `norm.lacks`
    needs: str = "none"
    #: whether an experiment gives this method one node with the union of the clients' samples
    one_node: ClassVar[bool] = False
    #: the arguments of the constructor: an experiment makes a strategy of its own from them for each run
    made_with: tuple[tuple[Any, ...], Mapping[str, Any]]

    def __new__(cls, *positional: Any, **options: Any) -> Self:
        """Check what the constructors of all classes take, before they take it."""
        check_constructor(cls, options)
        strategy = super().__new__(cls)
        strategy.made_with = positional, options
        return strategy

    def __init__(
        self,
        *,
        lr_schedule: str = "",
        seed: int = 0,
        patience: float = float("inf"),
        exchange_timeout: float = 600.0,
        evaluate_every: Annotated[int, Range(1)] = 1,
        momentum_state: Annotated[
            MomentumKind, "keep the clients' optimizer state: none, local (on the node) or global (averaged)"
        ] = "none",
        server_optimizer: Annotated[
            OptimizerKind, "treat the averaged update as a gradient: none, adam, yogi, adagrad or momentum"
        ] = "none",
        server_lr: Annotated[float | None, "rate of the server optimizer [1 for momentum, else 0.1]"] = None,
        clip_norm: Annotated[
            float,
            "largest L2 norm of a step's gradient over all parameters, to which clients scale it down; 0: off",
            Range(0),
        ] = 0.0,
        clip_factor: Annotated[
            float, "largest ratio of a unit's gradient to its weights, to which clients clip it; 0: off", Range(0)
        ] = 0.0,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        self.schedule = read_schedule(lr_schedule)
        self.seed = seed
        self.patience = patience
        self.exchange_timeout = exchange_timeout
        self.evaluate_every = evaluate_every
        self.clip_norm, self.clip_factor = clip_norm, clip_factor
        self.momentum_state = momentum_state
        #: what `pools` and options say: `FedAvg.add_group` adds them
        self.groups: tuple[Group, ...] = ()
        #: the mean of the clients' optimizer states, if it is `global`
        self.momentum: Arrays = {}
        self.server_optimizer = None if server_optimizer == "none" else ServerOptimizer(server_optimizer, server_lr)
        self.roster = Roster(exchange_timeout)
        #: takes the place of means; a round with fewer usable replies than it needs leaves the model as it was
        self.robust: Robust | None = None
        self.num_rounds: int | None = None
        #: set by `start`; a loop of your own around `configure_train` and `aggregate_train` sets it by itself
        self.started = False
        self.partitions: dict[int, int] = {}
        #: by kind of message, how many examples each node said first, and how many times as many it may say later
        self.first_counts: dict[str, dict[int, float]] = {MessageType.TRAIN: {}, MessageType.EVALUATE: {}}
        self.count_growth = 2.0
        self.ever_trained = False
        self.frozen_after: int | None = None
        #: the binding keys that clients have acknowledged in training
        self.obeyed_before: set[str] = set()
        self._lost = LostRounds()
        self.round = Round()
        #: numbers that the method measured in the current round, for the results
        self.measured: dict[str, Any] = {}
        self.train_replies: list[NodeReply] = []
        self.evaluate_replies: list[NodeReply] = []
        self._sent: list[Message] = []
        #: why replies of the current round could not be used
        self._refused: list[Refusal] = []

    @property
    def server_round(self) -> int:
        """The number of the round, from 1 on."""
        return self.round.number

    @property
    def grid(self) -> Grid:
        """The round's way to the nodes."""
        if self.round.grid is None:
            raise RuntimeError(f"{type(self).__name__} has no grid before its first round")
        return self.round.grid

    @property
    def current(self) -> Arrays:
        """The global state that the round started from."""
        return self.round.current

    @property
    def instruction(self) -> Instruction:
        """The round's instruction."""
        return self.round.instruction

    @property
    def fewest_nodes(self) -> int:
        """The number of nodes below which nothing can be pooled."""
        return self.robust.fewest_nodes if self.robust else 1

    @property
    def why_single(self) -> str:
        """Why the method needs each node's own reply; empty if what `terms` says of all is enough."""
        return "it may look at single replies"

    # ---- the hooks -----------------------------------------------------------------------------------------------

    @classmethod
    def own_norm(cls, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return the normalizer, with its options, that the method needs under these constructor options."""
        return None

    def instruct(self, instruction: Instruction) -> Instruction:
        """Return the shared options, changed into what clients do in this round."""
        for change in self.schedule:
            rate = change.rate(instruction.lr, instruction.server_round, self.num_rounds, self.frozen_after)
            instruction = replace(instruction, lr=rate)
        if self.clip_norm:
            instruction = instruction.with_rule(clip_norm=float(self.clip_norm))
        if self.clip_factor and self.clips(instruction):
            instruction = instruction.with_rule(clip_factor=float(self.clip_factor))
        return replace(instruction, momentum_state=self.momentum_state, bn_needed=self.needs)

    def clips(self, instruction: Instruction) -> bool:
        """Return whether clients clip by `clip_factor` in this round."""
        return True

    def instruct_evaluation(self, instruction: Instruction) -> Instruction:
        """Return the shared options, changed into what clients do when they evaluate."""
        return replace(instruction, bn_needed=self.needs)

    def package(self, node: int, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """Return the groups of arrays that one node gets."""
        groups = {self.arrayrecord_key: arrays}
        return groups | ({wire.MOMENTUM: arrays_to_record(self.momentum)} if self.momentum else {})

    def collect(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Return the round's replies: those that came, or others that the method has asked for."""
        return replies

    @abstractmethod
    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return each reply's weight, up to a common factor."""

    @abstractmethod
    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Return the new global state, every entry of it."""

    def refine(self, merged: Arrays) -> Arrays:
        """Return the merged state, changed further; nodes can be asked through `self.grid`."""
        return merged

    def lose_round(self) -> None:
        """Take note of a round without a usable reply."""

    def learn_from_evaluation(self, replies: Sequence[NodeReply]) -> None:
        """Take what the method needs from nodes' evaluations."""

    def personal_mean(self) -> Arrays:
        """Return the mean of the entries that nodes keep, or nothing if they were not sent."""
        return {}

    def terms(self) -> Terms:
        """Return how the replies of this round are pooled, whoever does it."""
        return Terms("examples")

    def untrained(self) -> list[str]:
        """Return the entries of the final model that nobody trained, because they stay on the nodes."""
        return []

    # ---- Flower's interface --------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        rounds_done: int = 0,
    ) -> Result:
        """Run all rounds, or those after `rounds_done`; fractions of a run refer to `num_rounds`.

        Before going on after some rounds, `load_state_dict` takes up what `state_dict` returned after them.
        """
        self.num_rounds, self.started = num_rounds, True
        left, configs = num_rounds - rounds_done, (timeout, train_config, evaluate_config)
        evaluate = evaluate_fn and (lambda number, state: evaluate_fn(number + rounds_done if number else 0, state))
        run = LaterRounds(self, rounds_done).start if rounds_done else super().start
        result = run(grid, initial_arrays, left, *configs, evaluate)
        if names := self.untrained():
            log(WARNING, UNTRAINED, len(names), ", ".join(names[:3]) + ", ..." * (len(names) > 3))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Instruct the drawn nodes."""
        if not self.started:
            raise RuntimeError(WRAPPED.format(type(self).__name__))
        if self.fraction_train == 0.0:
            return []
        self.measured = {}
        self._begin_round(MessageType.TRAIN, server_round, arrays, config, grid)
        nodes = self.draw_nodes(grid, server_round, self.fraction_train, self.min_train_nodes)
        return self._make_messages(nodes, arrays, config, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the usable replies; a round without one leaves the model as it was."""
        self.train_replies = self._require_enough(
            self._usable_replies(self.collect(replies), ends=not self.ever_trained)
        )
        if not self.train_replies:
            self._require_progress(server_round)
            self.lose_round()
            return None, None
        self._refuse_infinite_losses(server_round)
        self._lost = LostRounds()
        self.ever_trained = True
        weights = self.weigh(self.train_replies)
        if server_round == 1:
            name_dominant(self.train_replies, weights)
        merged = self.refine(self.merge(self.train_replies, weights))
        return arrays_to_record(merged), self._mean_metrics(self.train_replies, self.train_metrics_aggr_fn)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask nodes to evaluate, in the rounds that `evaluate_every` names."""
        if self.fraction_evaluate == 0.0 or not self.evaluates(server_round):
            return []
        self._begin_round(MessageType.EVALUATE, server_round, arrays, config, grid)
        nodes = self.draw_nodes(grid, server_round, self.fraction_evaluate, self.min_evaluate_nodes)
        return self._make_messages(nodes, arrays, config, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        self.evaluate_replies = self._usable_replies(replies)
        self.learn_from_evaluation(self.evaluate_replies)
        if not self.evaluate_replies:
            return None
        return self._mean_metrics(self.evaluate_replies, self.evaluate_metrics_aggr_fn)

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """End the program with one line: Flower's older server asks for this first."""
        # no ordinary exception: `start_simulation` answers those with a traceback and a page of guesses
        raise SystemExit(
            f"{type(self).__name__} cannot run in Flower's older server (`start_simulation`, `start_server`, "
            "`ServerApp(strategy=...)`): call `strategy.start(grid, initial_arrays, num_rounds)` in a function with "
            "`@server_app.main()`"
        )

    # ---- the parts -----------------------------------------------------------------------------------------------

    def draw_nodes(self, grid: Grid, server_round: int, fraction: float, minimum: int) -> list[int]:
        """Draw the nodes of a round; if all take part, they are not asked to describe themselves."""
        # those who were there may come back; a first round with too few says so at once
        fewest = self.fewest_nodes if self.ever_trained else 0
        nodes = wait_for_nodes(grid, max(self.min_available_nodes, minimum, fewest), self.patience)
        count = max(int(len(nodes) * fraction), minimum)
        return nodes if count >= len(nodes) else draw(self.describe(grid, nodes), count, self.seed, server_round)

    def describe(self, grid: Grid, nodes: list[int]) -> Mapping[int, Node]:
        """Ask nodes for their descriptions, once a run."""
        described = self.roster.describe(grid, nodes)
        for node, description in described.items():
            self.first_counts[MessageType.TRAIN].setdefault(node, description.num_examples)
        return described

    def evaluates(self, server_round: int) -> bool:
        """Return whether models are evaluated after a round."""
        return server_round % self.evaluate_every == 0 or server_round == self.num_rounds

    def circumstances(self) -> str:
        """Return what may have made training diverge in this round, and what to try, in words."""
        rate = f"the learning rate is {self.instruction.lr:g}: " if self.round.has_rate else ""
        return f"{rate}try a lower learning rate"

    def refuse_few(self, nodes: int, what: str = "models") -> list[Refusal]:
        """Say in the log why a robust rule does not pool values of so many nodes, and return it; nothing if it does."""
        if not 0 < nodes < self.fewest_nodes:
            return []
        missing = self.fewest_nodes - nodes
        why = f"robust={self.robust} needs {what} of {self.fewest_nodes} nodes, and has {nodes}: {missing} missing"
        log(WARNING, "Round %d: %s", self.server_round, why)
        return [Refusal(0, why)]

    def describe_node(self, node: int) -> Node:
        """Ask one node for its description."""
        return self.describe(self.grid, [node])[node]

    def _begin_round(self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> None:
        """Take the orders of the user and of the method, and with them what replies must hold."""
        config["server-round"] = server_round
        if isinstance(rounds := config.get(wire.NUM_ROUNDS), int):
            self.num_rounds = rounds
        self._refused = []
        orders, order_keys = (
            replace(Instruction.from_config(config), server_round=server_round),
            Instruction.wire_keys(),
        )
        other_config = {key: value for key, value in config.items() if key not in order_keys}
        self.round = Round(server_round, grid, arrays_of(arrays), orders, "lr" in config, other_config)
        trains = kind == MessageType.TRAIN
        instruction = self.instruct(orders) if trains else self.instruct_evaluation(orders)
        expected = Expected(
            instruction.binding_keys(),
            self.current,
            self.arrayrecord_key,
            self.weighted_by_key,
            [group.name for group in self.groups if group.name and group.is_required] if trains else (),
            instruction.later,
            self.first_counts[kind],
            self.count_growth,
        )
        self.round = replace(self.round, instruction=instruction, expected=expected)

    def _make_messages(
        self, nodes: Sequence[int], arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        self.round = replace(self.round, nodes=nodes)
        packed = ConfigRecord({**config, **self.instruction.to_config(always=config.keys())})
        self._sent = []
        for node in nodes:
            content = RecordDict({**self.package(node, arrays), self.configrecord_key: packed})
            self._sent.append(Message(content, dst_node_id=node, message_type=kind))
        return self._sent

    def _usable_replies(self, messages: Iterable[Message], ends: bool = False) -> list[NodeReply]:
        """Return the usable replies; if there is none and that `ends` the run, its error has the first reason."""
        expected = self.round.expected
        replies, refused = parse_replies(messages, self._sent, expected)
        self._refused += refused
        said = refused[0].reason if refused and ends and not replies else None
        log_refused([refusal for refusal in refused if refusal.reason != said])
        deaf = next((each for each in refused if NOT_OBEYED in each.reason), None)
        if deaf and not replies and set(expected.binding) - self.obeyed_before:
            raise NotObeyedError(f"node {deaf.node} {deaf.reason.removeprefix('it ')}")
        for reply in replies:
            self.partitions |= reply.nodes
            first = expected.first_counts.get(reply.node) or reply.metrics.get(wire.NUM_EXAMPLES, 0)
            expected.first_counts[reply.node] = first
        return replies

    def _require_enough(self, replies: list[NodeReply]) -> list[NodeReply]:
        """Return the replies, or none if they are fewer than a robust rule needs."""
        if replies:
            self.obeyed_before |= set(self.round.expected.binding)
        few = self.refuse_few(len(replies))
        self._refused = [*few, *self._refused]
        return [] if few else replies

    def _require_progress(self, server_round: int) -> None:
        reason = self._refused[0] if self._refused else "no node answered"
        all_infinite = bool(self._refused) and all(refusal.is_infinite for refusal in self._refused)
        if not self.ever_trained:
            if all_infinite:
                raise DivergedError(server_round, f"no node could train ({reason}); {self.circumstances()}")
            raise CannotTrainError(f"no node could train in round {server_round}: {reason}")
        new = sorted(set(self.round.expected.binding) - self.obeyed_before)
        if new and self._refused and not all_infinite:
            raise CannotTrainError(
                f"no node could train in round {server_round}, the first that asks for {', '.join(new)}: {reason}"
            )
        log(WARNING, "Round %d brought no usable reply: the model stays as it was", server_round)
        self._lost.add(server_round, self._refused, self._count_connected(), self.circumstances())

    def _refuse_infinite_losses(self, server_round: int) -> None:
        """End the run if no node's loss is finite, unless this is one node among others."""
        sent = [loss for reply in self.train_replies if isinstance(loss := reply.metrics.get(wire.TRAIN_LOSS), float)]
        if sent and not any(map(isfinite, sent)) and len(sent) >= min(self._count_connected(), 2):
            raise DivergedError(server_round, f"no node's training loss is finite; {self.circumstances()}")

    def _count_connected(self) -> int:
        return len(list(self.round.grid.get_node_ids())) if self.round.grid else 0

    def _mean_metrics(self, replies: Sequence[NodeReply], mean: Any) -> MetricRecord:
        if mean is aggregate_metricrecords:
            # a metric that some nodes lack has no mean over all
            shared = set.intersection(*(set(reply.metrics) for reply in replies)) - {wire.PARTITION_ID}
            return mean_metrics(replies, sorted(shared - {self.weighted_by_key}), self.weighted_by_key)
        metrics: MetricRecord = mean([reply.content for reply in replies], self.weighted_by_key)
        return metrics
