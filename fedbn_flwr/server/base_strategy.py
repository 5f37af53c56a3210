"""A round of federated learning on Flower, and the hooks that a method overrides."""

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO
from typing import Annotated, Any, ClassVar, NoReturn, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

from fedbn_flwr import wire
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.constructor_options import (
    MomentumKind,
    OptimizerKind,
    StatisticsKind,
    check_constructor,
)
from fedbn_flwr.server.exact_statistics import GATHERED, with_exact_statistics
from fedbn_flwr.server.grids import wait_for_nodes
from fedbn_flwr.server.head_from_sums import HEAD, solved_head
from fedbn_flwr.server.lr_schedule import read_schedule
from fedbn_flwr.server.method_state import (
    LostRounds,
    MethodState,
    merged_type,
    pack_state,
    unpack_state,
)
from fedbn_flwr.server.optimizers import ServerOptimizer
from fedbn_flwr.server.pooling import (
    MOMENTUM,
    Averager,
    Pooled,
    PooledGroup,
    Sent,
    Start,
    name_dominant,
    pool_groups,
    weights_by_node,
)
from fedbn_flwr.server.privacy import Privacy
from fedbn_flwr.server.replies import Expected, NodeReply
from fedbn_flwr.server.robust import Robust
from fedbn_flwr.server.round import Round
from fedbn_flwr.server.sampling import Node, Roster, draw_described
from fedbn_flwr.state import Arrays, arrays_to_record
from fedbn_flwr.wire import Instruction

WRAPPED = (
    "{} must be started itself, by `start`: a strategy around it, such as Flower's for "
    "differential privacy, takes "
    "entries by their positions, also variances and counters; in its place, strategies take "
    "`privacy=Privacy(...)` (a loop of your own around `configure_train` sets `started = True`)"
)
#: the shares of the nodes that Flower's constructor takes as they are
SHARES = {"fraction_train": Range(0, 1, "low"), "fraction_evaluate": Range(0, 1)}
#: said where a loop of a user's own does not do what `start` does
NOT_ASKED = (
    "{} needs `replies = strategy.ask(grid, messages, timeout)` in the place of "
    "`grid.send_and_receive`"
)
NOT_GATHERED = (
    "{} needs `arrays = strategy.gather(arrays)` after `aggregate_train`, or "
    "statistics that are not exact"
)


class BaseStrategy(FlowerFedAvg):
    """Instruct clients, send them arrays, check their replies and let a method make the new state
    of them.

    `start` is the loop over the rounds: `configure_train` makes the messages, `ask` takes them to
    the nodes and brings their replies, `aggregate_train` makes the new state of these, `gather`
    replaces its BN statistics where exact ones are asked for, and the evaluation follows. A method
    overrides hooks and calls `super()`, so that methods can be combined. In the order in which a
    round calls them:

    - `own_norm`: the normalizer that the method brings, before there is a model and a round,
    - `begin`: the state that the first round starts from,
    - `instruct`: what clients do in this round,
    - `package`: the arrays that nodes get,
    - `ask`: the replies to the messages, which it takes to the nodes,
    - `check`: refuses a reply that the method cannot use,
    - `weigh`: how much each reply counts,
    - `update`: the new global state, made of what was pooled; it knows nothing of who pooled,
    - `lose_round`: takes the place of `update` after a round without a usable reply,
    - `gathers_from`: the nodes that exact statistics are gathered from after the round,
    - `is_finished`: whether later rounds would bring nothing,
    - `instruct_evaluation`: what clients do when they evaluate,
    - `learn_from_evaluation`: what the method takes from the nodes' evaluations.

    What a round is, hooks find in `self.round`, a `Round`: of training, until the evaluation has
    one of its own. What a method keeps from round to round is in `self.state`, a value of the class
    `state_type`, and nowhere else. What its nodes send beside the model stands in `sends`.

    Takes every argument of Flower's FedAvg, the options that its constructor explains, and

    - `lr_schedule`: the learning rate over the rounds, see `fedbn_flwr.server.lr_schedule`,
    - `seed`: decides which nodes are drawn when not all take part,
    - `patience`: how many seconds to wait for enough nodes before giving up; Flower waits for ever,
    - `exchange_timeout`: how many seconds nodes have to answer within a round, or to describe
      themselves,
    - `evaluate_every`: how often nodes evaluate, if `fraction_evaluate` asks for it; the last round
      always counts,
    - `robust`: what stands in the place of means (see `Robust`), in whatever the method pools:
      models, statistics and gradients of exchanges, carried values, gathered statistics and control
      variates,
    - `statistics`: the BN statistics that a model is evaluated and kept with; None is the first of
      `evaluated_with`,
    - `privacy`: clips the nodes' updates and adds noise to their mean (see `Privacy`), under
      uniform weights. It stands in place of Flower's wrappers, which take entries by position and
      add noise to variances.
    """

    #: the paper of the method, in Markdown
    paper: ClassVar[str] = ""
    #: whether nodes end up with models of their own, which only they can evaluate
    personal: ClassVar[bool] = False
    #: the entries that stay on the nodes, one of `wire.GROUPS`
    stays: ClassVar[str] = "none"
    #: constructor arguments of a base class that have another name here, or would do nothing
    replaced: ClassVar[tuple[str, ...]] = ()
    #: the values that `statistics` may have
    evaluated_with: ClassVar[tuple[str, ...]] = ("running", "exact")
    #: what nodes send beside the model; each class of a hierarchy names only its own
    sends: ClassVar[tuple[Sent, ...]] = ()
    #: what the method keeps from round to round
    state_type: ClassVar[type[MethodState]] = MethodState
    #: what a model must have of BN, or the method would be another one; see `norm.lacks`
    needs: str = "none"
    #: whether the method looks at single nodes' training replies, so that stacks must not average
    #: them
    reads_replies: bool = False
    #: how much a client counts, `examples` or `uniform`, where stacks average their nodes' replies
    weighting: str = "examples"
    #: the arguments of the constructor: an experiment makes a strategy of its own from them for
    #: each run
    made_with: tuple[tuple[Any, ...], Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        """Let a method that is made of several keep what all of them keep."""
        super().__init_subclass__()
        kept = [base.state_type for base in cls.__bases__ if issubclass(base, BaseStrategy)]
        if "state_type" not in vars(cls):
            merged = merged_type(kept)
            if merged is not cls.state_type:
                cls.state_type = merged

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
            MomentumKind,
            "keep the clients' optimizer state: none, local (on the node) or global (averaged)",
        ] = "none",
        server_optimizer: Annotated[
            OptimizerKind,
            "treat the averaged update as a gradient: none, adam, yogi, adagrad or momentum",
        ] = "none",
        server_lr: Annotated[
            float | None, "learning rate of the server optimizer [1 for momentum, else 0.1]"
        ] = None,
        clip_norm: Annotated[
            float,
            "largest L2 norm of a step's gradient over all parameters, to which clients scale it "
            "down; 0: off",
            Range(0),
        ] = 0.0,
        clip_factor: Annotated[
            float,
            "largest ratio of a unit's gradient to its weights, to which clients clip it; 0: off",
            Range(0),
        ] = 0.0,
        robust: Annotated[
            str, "rule in place of means: none, median, trimmed:B, multi-krum:F or norm:C"
        ] = "none",
        statistics: Annotated[
            StatisticsKind | None,
            "BN statistics to evaluate and keep a model with: running (as trained), exact "
            "(gathered from all nodes by the new model) or own (of each node's own data) [running, "
            "unless the method has others]",
        ] = None,
        gather_samples: Annotated[
            int,
            "samples of each node that gathered statistics come from, in one batch; 0 means all",
            Range(0),
        ] = 0,
        freeze_bn: Annotated[
            bool,
            "keep BN statistics as the initial model has them, in training too; affine parameters "
            "still learn",
        ] = False,
        closed_form: Annotated[
            str,
            "solve a linear layer in closed form before the first round: head (the last one), or "
            "its name; the network must have been trained",
        ] = "",
        privacy: Privacy | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        for name, allowed in SHARES.items():
            share = getattr(self, name)
            if not allowed.has(share):
                raise ValueError(f"{name} must be {allowed}, got {share}")
        self.schedule = read_schedule(lr_schedule)
        self.seed = seed
        self.patience = patience
        self.exchange_timeout = exchange_timeout
        self.evaluate_every = evaluate_every
        self.momentum_state = momentum_state
        self.clip_norm = clip_norm
        self.clip_factor = clip_factor
        #: the size of mini-batches from which on clients clip by `clip_factor`
        self.clips_from: float = 0
        if privacy and robust != "none":
            raise ValueError(
                "privacy needs the mean, to which its noise is scaled: robust must be none"
            )
        #: makes one of the nodes' numbers, and what changes the mean of the models then
        self.averager: Averager = (
            Robust.parse(robust) if robust != "none" else privacy or Averager()
        )
        self.optimizer: ServerOptimizer | None = None
        if server_optimizer != "none":
            self.optimizer = ServerOptimizer(server_optimizer, server_lr)
        elif server_lr is not None:
            raise ValueError("server_lr is the rate of a server_optimizer, which is none")
        self.gather_samples = gather_samples
        self.statistics = statistics or self.evaluated_with[0]
        if self.statistics not in self.evaluated_with:
            known = " or ".join(self.evaluated_with)
            raise ValueError(
                f"statistics of {type(self).__name__} must be {known}, got {statistics!r}"
            )
        if gather_samples and self.statistics == "running":
            raise ValueError("gather_samples are of gathered statistics, but statistics is running")
        if self.statistics != "running" and self.needs == "none":
            self.needs = "statistics"
        self.freeze_bn = freeze_bn
        if freeze_bn and self.needs not in ("none", "affine"):
            about = f"{type(self).__name__} with statistics={self.statistics}"
            raise ValueError(
                f"freeze_bn keeps BN statistics as they are, so {about} would be another method"
            )
        if freeze_bn and self.needs == "none":
            self.needs = "all-statistics"
        #: the groups whose means the method gets
        self.groups: list[PooledGroup] = []
        named = [
            sent
            for parent in reversed(type(self).__mro__)
            for sent in vars(parent).get("sends", ())
        ]
        if momentum_state == "global":
            named.append(MOMENTUM)
        if self.statistics == "exact":
            named.append(GATHERED)
        for sent in named:
            self.let_send(sent)
        self.closed_form = closed_form
        if closed_form:
            self.averager.refuse(type(self).__name__, HEAD)
        self.state = self.state_type()
        self.roster = Roster(exchange_timeout)
        self.num_rounds: int | None = None
        #: set by `start`; a loop of your own around `configure_train` and `aggregate_train` sets it
        #: by itself
        self.started = False
        #: the partition of every node that has named it; nodes have other ids in another process
        self.partitions: dict[int, int] = {}
        #: the latest rounds of both kinds; `round` is one of them
        self.training = self.evaluation = self.round = Round()

    def let_send(self, sent: Sent) -> None:
        """Let nodes send this beside the model; ValueError if that leaves them around clipping,
        noise or `robust`.
        """
        self.averager.refuse(type(self).__name__, sent)
        if isinstance(sent, PooledGroup):
            self.groups.append(sent)

    @property
    def needs_single_replies(self) -> bool:
        """Return whether the mean of several nodes would not do in the place of their replies."""
        return (
            self.reads_replies
            or self.averager.reads_replies
            or self.weighted_by_key != wire.NUM_EXAMPLES
        )

    # ---- the hooks -------------------------------------------------------------------------------

    @classmethod
    def own_norm(cls, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return the normalizer, with its options, that the method needs under these constructor
        options.
        """
        return None

    def begin(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> ArrayRecord:
        """Return the state that the first round starts from, of the initial one."""
        if not self.closed_form:
            return arrays
        wait_for_nodes(grid, self.min_available_nodes, self.patience)
        return solved_head(arrays, config, grid, self.closed_form, self.exchange_timeout)

    def instruct(self, instruction: Instruction) -> Instruction:
        """Return the shared options, changed into what clients do in this round."""
        for change in self.schedule:
            rate = change.rate(
                instruction.lr, instruction.server_round, self.num_rounds, self.state.frozen_after
            )
            instruction = replace(instruction, lr=rate)
        if self.clip_norm:
            instruction = instruction.with_rule(clip_norm=float(self.clip_norm))
        if self.clip_factor and instruction.batch_size >= self.clips_from:
            instruction = instruction.with_rule(clip_factor=float(self.clip_factor))
        later = "gather"
        if self.statistics == "running":
            later = ""
        instruction = replace(instruction, later=later, gather_samples=self.gather_samples)
        if self.freeze_bn:
            instruction = replace(instruction, freeze="statistics", omit="statistics")
        return replace(
            instruction, momentum_state=self.momentum_state, bn_needed=self.needs, stays=self.stays
        )

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """Return the groups of arrays that each of these nodes gets."""
        groups = {self.arrayrecord_key: arrays}
        if self.state.momentum:
            groups[wire.MOMENTUM] = arrays_to_record(self.state.momentum)
        return {node: dict(groups) for node in nodes}

    def ask(self, grid: Grid, messages: Sequence[Message], timeout: float) -> Iterable[Message]:
        """Take the messages of training to the nodes, and return the replies, at most `timeout`
        seconds later.
        """
        self.round.was_asked = True
        return grid.send_and_receive(messages, timeout=timeout)

    def check(self, reply: NodeReply) -> None:
        """Raise RefusedError for a reply that the method cannot use."""

    @abstractmethod
    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return each reply's weight, up to a common factor."""

    @abstractmethod
    def update(self, pooled: Pooled) -> Arrays:
        """Return the new global state, every entry of it.

        Nodes can be asked through `self.round.grid`.
        """

    def lose_round(self) -> None:
        """Take note of a round without a usable reply."""

    def instruct_evaluation(self, instruction: Instruction) -> Instruction:
        """Return the shared options, changed into what clients do when they evaluate."""
        own: dict[str, Any] = {"gather": wire.STATISTICS, "gather_samples": self.gather_samples}
        changes = own if self.statistics == "own" else {}
        return replace(instruction, bn_needed=self.needs, stays=self.stays, **changes)

    def learn_from_evaluation(self, replies: Sequence[NodeReply]) -> None:
        """Take what the method needs from nodes' evaluations."""

    def is_finished(self, grid: Grid) -> bool:
        """Return whether further rounds would bring nothing, so that a run ends."""
        return False

    # ---- Flower's interface ----------------------------------------------------------------------

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
        on_round: Callable[[Round], bool] | None = None,
    ) -> Result:
        """Run all rounds, or those after `rounds_done`; fractions of a run refer to `num_rounds`.

        Before going on after some rounds, `load_state_dict` takes up what `state_dict` returned
        after them. `on_round` is called with every round at its end; if it returns True, the run
        ends there.
        """
        self.num_rounds = num_rounds
        self.started = True
        log(INFO, "Starting %s strategy:", type(self).__name__)
        log_strategy_start_info(num_rounds, initial_arrays, train_config, evaluate_config)
        self.summary()
        log(INFO, "")
        configs = [
            ConfigRecord() if given is None else given for given in (train_config, evaluate_config)
        ]
        arrays = initial_arrays
        result = Result()
        began = time.perf_counter()
        if not rounds_done:
            arrays = self.begin(arrays, configs[0], grid)
        if evaluate_fn and not rounds_done:
            _note(
                "Initial global evaluation results",
                result.evaluate_metrics_serverapp,
                0,
                evaluate_fn(0, arrays),
            )
        result.arrays = arrays
        for number in range(rounds_done + 1, num_rounds + 1):
            if self.is_finished(grid):
                break
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", number, num_rounds)
            messages = list(self.configure_train(number, arrays, configs[0], grid))
            # a user's own `configure_train` has made the messages
            if self.training.number != number:
                self._refuse_unsaid()
                self.training = self.round = Round.begin(number, arrays, configs[0], grid)
            asked = self.ask(grid, messages, timeout) if messages else ()
            self.training.was_asked = True  # also by an `ask` of a user's own, and so is `gather`
            trained, metrics = self.aggregate_train(number, asked)
            arrays = self.gather(arrays if trained is None else trained)
            self.training.was_gathered = True
            _note("\t└──> Aggregated MetricRecord", result.train_metrics_clientapp, number, metrics)
            messages = list(self.configure_evaluate(number, arrays, configs[1], grid))
            replies = grid.send_and_receive(messages, timeout=timeout) if messages else ()
            metrics = self.aggregate_evaluate(number, replies)
            _note(
                "\t└──> Aggregated MetricRecord", result.evaluate_metrics_clientapp, number, metrics
            )
            if evaluate_fn:
                log(INFO, "Global evaluation")
                _note(
                    "\t└──> MetricRecord",
                    result.evaluate_metrics_serverapp,
                    number,
                    evaluate_fn(number, arrays),
                )
            result.arrays = arrays
            if on_round and on_round(self.training.end(arrays)):
                break
        if self.stays != "none":
            self.state.name_untrained(self.training.current)
        log(INFO, "")
        log(INFO, "Strategy execution finished in %.2fs", time.perf_counter() - began)
        log(INFO, "")
        log(INFO, "Final results:")
        for line in ["", *str(result).splitlines(), ""]:
            log(INFO, "\t%s", line)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Instruct the drawn nodes."""
        if not (self.started or type(self).start is not BaseStrategy.start):
            raise RuntimeError(WRAPPED.format(type(self).__name__))
        earlier = self.training
        if self.statistics == "exact" and earlier.replies and not earlier.was_gathered:
            raise RuntimeError(NOT_GATHERED.format(type(self).__name__))
        self.training = self._begin_round(server_round, arrays, config, grid, MessageType.TRAIN)
        nodes = self.draw_nodes(grid, server_round, self.fraction_train, self.min_train_nodes)
        kind = MessageType.TRAIN
        if self.round.instruction.waits_for_others:
            kind = wire.LAYERWISE
        elif not self.round.instruction.trains:
            kind = wire.GATHER
        return self._make_messages(nodes, arrays, config, kind)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Update the state with the usable replies.

        A round without one leaves the model as it was.
        """
        state = self.state
        now = self.round
        if now.instruction.waits_for_others and not now.was_asked:
            raise RuntimeError(NOT_ASKED.format(type(self).__name__))
        usable = now.read(replies, state, ends=not state.ever_trained)
        for reply in usable:
            self.partitions |= reply.nodes
            state.obeyed |= dict.fromkeys(now.expected.binding, True)
        numbers = Counter(partition for reply in usable for partition in reply.nodes.values())
        shared = [number for number, count in numbers.items() if count > 1]
        if shared:
            warn_once(
                f"several nodes say that they are partition {shared[0]}: give each client its own "
                "partition_id"
            )
        few = self.averager.refuse_few(len(usable), server_round)
        if few:
            now.refused = [*few, *now.refused]
            now.replies = []
        if not now.replies:
            now.lose(state)
            self.lose_round()
            return None, None
        now.refuse_infinite_losses(state)
        state.lost = LostRounds()
        state.ever_trained = True
        pooled = self._pool(usable)
        name_dominant(pooled.weights, "training")
        merged = arrays_to_record(self.update(pooled))
        return merged, now.mean_metrics(self.train_metrics_aggr_fn, self.weighted_by_key)

    def gather(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the round's new state with exact statistics, if they are due.

        If no node has trained in the round, the state may still have the statistics of training.
        """
        now = self.training
        now.was_gathered = True
        if self.statistics != "exact" or now.instruction.freeze in ("statistics", "both"):
            return arrays
        asked = self.gathers_from(now)
        if not asked:
            return arrays
        models = {
            node: groups[self.arrayrecord_key]
            for node, groups in self.package(asked, arrays).items()
        }
        return with_exact_statistics(
            arrays, models, now, self.averager, self.exchange_timeout, self.state
        )

    def gathers_from(self, now: Round) -> list[int]:
        """Return the nodes that exact statistics are gathered from after a round: all, where it is
        evaluated or frozen.
        """
        if self.evaluates(now.number) or now.number == self.state.frozen_after:
            return sorted(now.grid.get_node_ids())
        return []

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask nodes to evaluate, in the rounds that `evaluate_every` names."""
        if self.fraction_evaluate == 0.0 or not self.evaluates(server_round):
            return []
        self.evaluation = self._begin_round(
            server_round, arrays, config, grid, MessageType.EVALUATE
        )
        nodes = self.draw_nodes(grid, server_round, self.fraction_evaluate, self.min_evaluate_nodes)
        return self._make_messages(nodes, arrays, config, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the nodes' metrics."""
        if self.round is not self.evaluation:  # Flower asks in every round
            return None
        usable = self.round.read(replies, self.state)
        for reply in usable:
            self.partitions |= reply.nodes
        name_dominant(
            {node: count for reply in usable for node, count in reply.counts.items()}, "evaluation"
        )
        self.learn_from_evaluation(usable)
        if usable:
            return self.round.mean_metrics(self.evaluate_metrics_aggr_fn, self.weighted_by_key)
        return None

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """End the program with one line: Flower's older server asks for this first."""
        # no ordinary exception: `start_simulation` answers those with a traceback and a page of
        # guesses
        raise SystemExit(
            f"{type(self).__name__} cannot run in Flower's older server (`start_simulation`, "
            "`start_server`, `ServerApp(strategy=...)`): call `strategy.start(grid, "
            "initial_arrays, num_rounds)` in a function with `@server_app.main()`"
        )

    # ---- what hooks and results use --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return `state` as a checkpoint holds it, with partitions in place of nodes' ids."""
        return pack_state(self.state, self.partitions)

    def load_state_dict(self, packed: Mapping[str, Any], nodes: Mapping[int, int]) -> None:
        """Take up what `state_dict` returned.

        `nodes` are the present ids by partition, absent nodes are forgotten.
        """
        unpack_state(self.state, packed, nodes)
        self.partitions = {node: partition for partition, node in nodes.items()}

    def draw_nodes(self, grid: Grid, server_round: int, fraction: float, minimum: int) -> list[int]:
        """Draw the nodes of a round; if all take part, they are not asked to describe
        themselves.
        """
        # those who were there may come back; a first round with too few says so at once
        fewest = 0
        if self.state.ever_trained:
            fewest = self.averager.fewest_nodes
        there = wait_for_nodes(grid, max(self.min_available_nodes, minimum, fewest), self.patience)
        count = max(int(len(there) * fraction), minimum)
        nodes = self.eligible(there)
        if count >= len(nodes):
            return nodes
        return draw_described(self.describe(grid, nodes), count, self.seed, server_round)

    def eligible(self, nodes: list[int]) -> list[int]:
        """Return the nodes that a round may ask."""
        return nodes

    def describe(self, grid: Grid, nodes: list[int]) -> Mapping[int, Node]:
        """Ask nodes for their descriptions, once a run."""
        described = self.roster.describe(grid, nodes)
        for node, description in described.items():
            self.partitions.setdefault(node, description.partition)
        return described

    def evaluates(self, server_round: int) -> bool:
        """Return whether models are evaluated after a round."""
        is_last = self.is_finished(self.round.grid) or server_round == self.num_rounds
        return is_last or server_round % self.evaluate_every == 0

    # ---- the parts -------------------------------------------------------------------------------

    def _begin_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, kind: str
    ) -> Round:
        """Take the orders of the user and of the method, and with them what replies must hold."""
        rounds = config.get(wire.NUM_ROUNDS)
        if isinstance(rounds, int):
            self.num_rounds = rounds
        self.round = now = Round.begin(server_round, arrays, config, grid)
        required = []
        if kind == MessageType.TRAIN:
            now.instruction = self.instruct(now.instruction)
            required = [group.record for group in self.groups if group.is_required]
        else:
            now.instruction = self.instruct_evaluation(now.instruction)
        now.expected = Expected(
            now.instruction.binding_keys(),
            now.current,
            self.arrayrecord_key,
            self.weighted_by_key,
            required,
            now.instruction.later,
        )
        if kind == MessageType.TRAIN:
            trains = now.instruction.trains
            now.expected = replace(now.expected, needs_model=trains, check=self.check)
        return now

    def _refuse_unsaid(self) -> None:
        """Refuse options that clients learn of by `configure_train`, where a user's own one does
        not call this one.
        """
        given = {
            "clip_norm": self.clip_norm > 0,
            "clip_factor": self.clip_factor > 0,
            "freeze_bn": self.freeze_bn,
            "momentum_state": self.momentum_state != "none",
        }
        unsaid = [name for name, is_given in given.items() if is_given]
        if unsaid:
            raise ValueError(
                f"{type(self).__name__}.configure_train does not call super().configure_train, so "
                f"clients are not told of {', '.join(unsaid)}: change the messages that it "
                "returns, or leave the option out"
            )

    def _make_messages(
        self, nodes: Sequence[int], arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        packed = ConfigRecord({**config, **self.round.instruction.to_config(always=config.keys())})
        self.round.nodes = nodes
        for node, groups in self.package(nodes, arrays).items():
            self.round.messages.append(
                Message(RecordDict({**groups, self.configrecord_key: packed}), node, kind)
            )
        return self.round.messages

    def _pool(self, replies: Sequence[NodeReply]) -> Pooled:
        """Return the replies as one, with what the server optimizer makes of the mean of the
        models.
        """
        parameters = partial(self.roster.parameters, self.round.grid, self.round.current)
        start = Start(self.round.number, self.round.current, parameters)
        weights = self.weigh(replies)
        model = self.averager.average([reply.arrays for reply in replies], weights, start)
        if self.optimizer:
            model = self.optimizer.apply(model, start, self.state.moments)
        groups = pool_groups(replies, weights, self.groups, self.averager)
        self.state.shared = dict.fromkeys(model, True)
        self.state.momentum = groups.get(wire.MOMENTUM) or self.state.momentum
        return Pooled(model, groups, weights_by_node(replies, weights, self.weighting), replies)


def _note(
    what: str, history: dict[int, MetricRecord], number: int, metrics: MetricRecord | None
) -> None:
    """Log a round's metrics, and keep them, if there are any."""
    if metrics is not None:
        log(INFO, "%s: %s", what, metrics)
        history[number] = metrics
