"""The client: it loads what it received, obeys the instruction, and says which keys it obeyed."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, nullcontext
from functools import cached_property
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import batch_plan as batches
from fedbn_flwr.client import captured, training
from fedbn_flwr.client.batch_plan import BatchLoader
from fedbn_flwr.client.captured import Captured
from fedbn_flwr.client.evaluation import evaluate, mean_loss, shares
from fedbn_flwr.client.image_order import channels_last
from fedbn_flwr.client.learning_task import TASKS, LearningTask
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.passes import Pass, make_pass
from fedbn_flwr.client.reply import Metrics, Reply
from fedbn_flwr.client.rules import Session, obeyed_keys, rules_for
from fedbn_flwr.data import Split
from fedbn_flwr.data.splits import USUAL_TASKS, Batch
from fedbn_flwr.device import pick_device
from fedbn_flwr.layerwise import Exchange, shared_statistics
from fedbn_flwr.models import check_entries
from fedbn_flwr.randomness import OwnRandomness, derive, torch_generator
from fedbn_flwr.state import State, tied_names, with_all_names
from fedbn_flwr.wire import Instruction


class BNClient:
    """A client that can be used with every strategy of this project, and with Flower's own.

    `memory` is the node's `Context.state`, and all that lasts from one message to the next. The
    clients of a process may share one model, because every message overwrites its whole state.
    `task` is what the split's targets are for, unless another one is given. `loss_function`, in
    place of the task's, takes what the model returns, and the labels. `make_optimizer` takes the
    model and the instruction, whose `lr` is the round's. On an accelerator, steps are captured and
    replayed: `captured` says of which layers.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Split,
        *,
        test: Split | None = None,
        num_classes: int = 10,
        indices: np.ndarray | None = None,
        partition_id: int = 0,
        memory: RecordDict | None = None,
        device: str = "auto",
        task: LearningTask | None = None,
        loss_function: training.LossFunction | None = None,
        make_optimizer: training.MakeOptimizer = training.make_optimizer,
        captured: Captured = "auto",
    ) -> None:
        self.device = pick_device(device)
        if model not in _CHECKED:
            check_entries(type(model).__name__, model)
            _CHECKED.add(model)
        #: the model as it was given, which need not be on the device
        self.structure = model
        self.train_split = train
        self.test_split = test
        self.num_classes = num_classes
        if indices is None:
            self.indices = np.arange(len(train))
        else:
            self.indices = indices
        self.partition_id = partition_id
        self.memory = Memory(RecordDict() if memory is None else memory)
        self.task = task or TASKS[USUAL_TASKS[train.targets]]
        if loss_function:
            self.task = self.task.with_loss(loss_function)
        self.loss_function = self.task.loss
        self.make_optimizer = make_optimizer
        self.captured = captured

    @cached_property
    def model(self) -> nn.Module:
        """The model, on the device; of a stack's clients only the first one's is asked for."""
        return _moved(self.structure, self.device)

    # ---- the messages ----------------------------------------------------------------------------

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        """Train for one round, and reply with what the instruction shares.

        In a layer-wise step by messages, `exchange` reaches the other clients, and who takes the
        step seeds dropout.
        """
        self._load(received[wire.ARRAYS], instruction)
        received_loss = self.reported_loss(wire.RECEIVED_LOSS, self.model, instruction)
        stays = state.group_keys(self.model, instruction.stays)
        with training.frozen(self.model, instruction), training.products(instruction):
            optimizer = self.make_optimizer(self.model, instruction)
            session = Session(self.model, optimizer, instruction, received, self.memory, stays)
            with (
                nullcontext() if exchange else OwnRandomness(self.step_seed(instruction)).drawing()
            ):
                loss = self._learn(session, exchange)
        if stays:
            self.memory.store(wire.STAYS, state.snapshot(self.model, stays))
        unsent = stays | state.group_keys(self.model, instruction.omit)
        shared = state.own_copy(self.model, self.model.state_dict().keys() - unsent)
        metrics: Metrics = {
            wire.TRAIN_LOSS: loss,
            **received_loss,
            **self.reported_loss(wire.LOCAL_LOSS, self.model, instruction),
            **session.metrics,
        }
        return self.reply(metrics, instruction, {wire.ARRAYS: shared, **session.records})

    def reported_loss(self, metric: str, model: nn.Module, instruction: Instruction) -> Metrics:
        """Return a model's mean loss on all local samples, with its running statistics, if the
        instruction asks for this metric.
        """
        if instruction.report_loss != metric:
            return {}
        with training.products(instruction):
            loss = mean_loss(model, self.train_split, self.indices, self.device, self.loss_function)
        return {metric: loss}

    def gather(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
        """Reply with what a pass of the received model over this node's data adds up, without
        training.
        """
        self._load(received[wire.ARRAYS], instruction)
        made = make_pass(self.model, instruction, received)
        self._run(made, instruction)
        return self.reply({}, instruction, {wire.MOMENTS: made.found()})

    def _run(self, made: Pass, instruction: Instruction) -> None:
        """Run a pass over this node's data, the same again in a round."""
        generator = torch_generator(instruction.seed, "gather", *self._stream(instruction))
        chosen = torch.from_numpy(self.indices)[
            torch.randperm(len(self.indices), generator=generator)
        ]
        chosen = chosen[: instruction.gather_samples or None]
        most = instruction.gather_samples or instruction.batch_size
        sizes = batches.pass_sizes(len(chosen), most, merge_single=True)
        drawn = self.train_split.batches(chosen, sizes, self.device)
        with training.products(instruction):
            made.run(drawn)

    def test(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
        """Evaluate the node's own model (the received one with the entries that live here) on the
        test split.
        """
        if self.test_split is None:
            raise ValueError("this client was given no test split to evaluate on")
        self._load(received[wire.ARRAYS], instruction)
        if instruction.gather:
            made = make_pass(self.model, instruction, received)
            self._run(made, instruction)
            own = made.own_entries()
            state.load(self.model, {**self.model.state_dict(), **own})
            stays = self.memory.personal(state.group_keys(self.model, instruction.stays))
            self.memory.store(wire.STAYS, {**stays, **own})
        splits = (self.train_split, self.test_split)
        wanted = list(filter(None, instruction.class_metrics.split(",")))
        domains = max(
            int(split.domains.max()) + 1 if split.domains is not None else 0 for split in splits
        )
        with training.products(instruction):
            options = self.device, 500, domains, self.task, wanted
            result = evaluate(self.model, self.test_split, self.num_classes, *options)
        own_domains, own_classes = shares(self.train_split, self.indices, self.num_classes, domains)
        personal = {
            name: result.score_for(measure, own_domains)
            for name, measure in self.task.measures.items()
        }
        basic = self.task.basic_score
        metrics: Metrics = {
            wire.EVAL_LOSS: result.loss,
            basic: result.accuracy,
            f"{basic}-personal": result.accuracy_for(own_domains, own_classes),
            wire.DOMAIN_SCORES + self.task.metric: result.by_domain(self.task.measure),
            wire.DOMAIN: self.domain,
            **{wire.CLASS + name: values for name, values in result.by_class.items()},
            **{wire.SCORE + name: value for name, value in result.scores.items()},
            **{f"{wire.SCORE}{name}-personal": value for name, value in personal.items()},
            **self.reported_loss(wire.LOCAL_LOSS, self.model, instruction),
        }
        sent = state.group_keys(
            self.model, instruction.stays if instruction.send_personal else "none"
        )
        return self.reply(metrics, instruction, {wire.STAYS: state.snapshot(self.model, sent)})

    def describe(self) -> Reply:
        """Reply with the node's partition, its number of samples, and its domain if it has exactly
        one.
        """
        metrics: Metrics = {wire.DOMAIN: self.domain, wire.PARTITION_ID: self.partition_id}
        return Reply(len(self.indices), metrics, report=model_names(self.model))

    @property
    def domain(self) -> int:
        """The domain of all of the node's samples; -1 if they have several."""
        domains = self.train_split.domains
        if domains is None:
            present = set()
        else:
            present = set(domains[torch.from_numpy(self.indices)].tolist())
        if len(present) == 1:
            return int(present.pop())
        return -1

    # ---- the parts -------------------------------------------------------------------------------

    def _load(self, received: State, instruction: Instruction) -> None:
        training.require_bn(self.model, instruction)
        stays = state.group_keys(self.model, instruction.stays)
        personal = self.memory.personal(stays)
        state.load(self.model, {**received, **personal} if personal else received)

    def _learn(self, session: Session, exchange: Exchange | None) -> float:
        self.model.train()
        planned = self.plan(session.instruction)
        session.steps = len(planned)
        rules = rules_for(session.instruction)
        for rule in rules:
            rule.begin(session)
        exchange = exchange or training.carried_exchange(session.received, session.instruction)
        losses = training.LossTotals(session, 1, self.device)

        def loss_of(batch: Batch) -> Tensor:
            inputs, targets = batch
            # a class of a user's own gets the usual order
            if type(self) is BNClient:
                inputs = channels_last(inputs, self.model)
            loss = training.batch_loss(
                self.model, (inputs, targets), session.instruction, self.loss_function
            )
            losses.add(loss, len(targets))
            return loss

        step = captured.steps(
            session,
            rules,
            loss_of,
            self.loss_function,
            self.captured,
            lambda batch: (None, batch),
            lambda _, tensors: (tensors[0], tensors[1]),
        )
        # closed, because clients may share the model, and an error that is kept keeps its step
        with closing(self._first_shared(planned, session, exchange)) as drawn:
            for batch in drawn:
                step(batch)
        for rule in rules:
            rule.finish(session)
        session.records |= training.carried_records(exchange)
        [mean] = losses.means([sum(planned.sizes)])
        return mean

    def plan(self, instruction: Instruction) -> BatchLoader:
        """Draw the mini-batches of a round."""
        generator = torch_generator(instruction.seed, "batches", *self._stream(instruction))
        sizes = self.batch_sizes(instruction)
        drawn = batches.draw_batches(len(self.indices), sizes, instruction.replacement, generator)
        samples = torch.from_numpy(self.indices)[drawn]
        return BatchLoader(
            self.train_split, self.device, instruction.augmentation, samples, sizes, generator
        )

    def batch_sizes(self, instruction: Instruction) -> list[int]:
        """Return the sizes of a round's mini-batches."""
        return batches.batch_sizes(len(self.indices), instruction, self._merges_single(instruction))

    def _merges_single(self, instruction: Instruction) -> bool:
        """Whether a last sample is left over in a round that updates BN statistics."""
        left_over = batches.leaves_one(len(self.indices), instruction.batch_size)
        frozen = training.frozen_parts(instruction.freeze)["statistics"]
        return left_over and not frozen and bool(norm.bn_layers(self.model))

    def _first_shared(
        self, planned: Iterable[Batch], session: Session, exchange: Exchange | None
    ) -> Generator[Batch, None, None]:
        """Yield the batches; in a layer-wise round, BN uses all clients' statistics in the step of
        the first.

        That step happens while this generator waits inside `with`; the layers are put back after
        it.
        """
        remaining = iter(planned)
        if session.instruction.layerwise != "none":
            if exchange is None:
                raise ValueError(f"a layer-wise step needs messages of the kind {wire.LAYERWISE!r}")
            with shared_statistics(
                self.model, exchange, training.layerwise_mode(session.instruction)
            ):
                yield next(remaining)
        yield from remaining

    def step_seed(self, instruction: Instruction) -> int:
        """Return the seed of this round's dropout, which draws from torch's global generator."""
        return derive(instruction.seed, "dropout", *self._stream(instruction))

    def _stream(self, instruction: Instruction) -> tuple[str | int, ...]:
        return "round", instruction.server_round, "partition", self.partition_id

    def reply(
        self, metrics: Metrics, instruction: Instruction, records: Mapping[str, State]
    ) -> Reply:
        """Make a reply that names this client's partition and the binding keys that it obeyed."""
        metrics[wire.PARTITION_ID] = self.partition_id
        return Reply(
            len(self.indices), metrics, dict(records), {wire.OBEYED: obeyed_keys(instruction)}
        )


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model, unless its first and its last parameter are there: to look at all takes 0.3 ms
    of every message.
    """
    parameters = list(model.parameters())
    ends = {parameter.device for parameter in (*parameters[:1], *parameters[-1:])}
    is_there = ends and all(
        each.type == device.type and device.index in (None, each.index) for each in ends
    )
    return model if is_there else model.to(device)


def model_names(model: nn.Module) -> dict[str, list[str]]:
    """Return a model's parameter and BN names, collected once: a server may ask thousands of nodes
    that share it.
    """
    if model not in _NAMES:
        _NAMES[model] = {
            wire.PARAMETERS: [name for name, _ in model.named_parameters(remove_duplicate=False)],
            wire.TIED: [name for pair in tied_names(model).items() for name in pair],
            wire.BN_ENTRIES: sorted(with_all_names(model, set(norm.bn_keys(model)))),
        }
    return dict(_NAMES[model])


_NAMES: WeakKeyDictionary[nn.Module, dict[str, list[str]]] = WeakKeyDictionary()
#: the models that clients may have: to look at one takes as long as a message
_CHECKED: WeakSet[nn.Module] = WeakSet()
