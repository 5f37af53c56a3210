"""Flower's `Grid` without Ray or a network: nodes on this machine, and those that the ServerApp's
own process runs.

`InProcessGrid` trains message by message, `OneByOneGrid` without what a message by itself repeats.
"""

from abc import abstractmethod
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient, captured
from fedbn_flwr.clientapp.bn_client_app import BNClientApp, SharedRecords, read_message
from fedbn_flwr.server.grids import identify
from fedbn_flwr.simulation.how_trained import HowTrained
from fedbn_flwr.simulation.reply_pool import Job, Replies, ReplyPool, Trained, changes_nothing
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import to_device
from fedbn_flwr.state.record_files import SUFFIX, pack_records, read_records
from fedbn_flwr.state.records import lend_record
from fedbn_flwr.whole_files import write_bytes
from fedbn_flwr.wire.packed import with_content

try:
    from flwr.supercore.run import Run
except ImportError:  # before Flower 1.35
    from flwr.common.typing import Run  # type: ignore[attr-defined,no-redef]
try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # before Flower 1.38: messages need none
    TaskIdentity = None  # type: ignore[assignment,misc]

RunConfig = Mapping[str, Any]

#: Flower reserves small ids for its own parts
FIRST_NODE_ID = 1000
#: the file with the largest stack that is tried, if there is such a limit, beside nodes' states
STACKS = "stacks"
#: most messages of a push that are prepared before the first of them trains
PORTION = 100


class StateFolder(MutableMapping[int, RecordDict]):
    """A folder of the nodes' states: a file for each partition, replaced as a whole."""

    def __init__(self, folder: Path, partitions: Container[int]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # other processes may have partitions of their own in the same folder
        self._partitions = partitions

    def __getitem__(self, partition: int) -> RecordDict:
        try:
            return read_records(self._path(partition))
        except FileNotFoundError:
            raise KeyError(partition) from None

    def __setitem__(self, partition: int, state: RecordDict) -> None:
        write_bytes(self._path(partition), pack_records(state))

    def __delitem__(self, partition: int) -> None:
        self._path(partition).unlink()

    def __iter__(self) -> Iterator[int]:
        return (partition for partition, path in self._files() if path.suffix == SUFFIX)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove the files, whatever is in them, also those that are not whole."""
        for _, path in self._files():
            path.unlink()

    def _files(self) -> list[tuple[int, Path]]:
        named = [(path.name.partition(".")[0], path) for path in self._folder.glob(f"*{SUFFIX}*")]
        return [
            (int(name), path)
            for name, path in named
            if name.isdecimal() and int(name) in self._partitions
        ]

    def _path(self, partition: int) -> Path:
        return self._folder / f"{partition}{SUFFIX}"


class LocalGrid(Grid):
    """A grid that keeps its nodes' contexts. The replies to messages that are pushed are put into
    `_replies`, by the messages' ids.
    """

    #: no more nodes will come
    is_complete = True

    def __init__(self) -> None:
        self._run = Run.create_empty(run_id=1)
        self._replies: dict[str, Message] = {}
        # Flower reads these when a message is created
        if getattr(TaskIdentity, "_run_id", 0) is None:
            TaskIdentity.run_id = self._run.run_id
            TaskIdentity.node_id = SUPERLINK_NODE_ID
            TaskIdentity.task_id = 0

    def set_run(self, run: Run) -> None:
        """Take the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as Flower's older interface does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand the replies over, once."""
        return [self._replies.pop(item) for item in message_ids if item in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Deliver and collect."""
        return self.pull_messages(self.push_messages(messages))

    @abstractmethod
    def contexts(self) -> Iterator[Context]:
        """Iterate over the contexts of the nodes that remember something."""

    @abstractmethod
    def remember(self, node: int, state: RecordDict) -> None:
        """Let a node remember this, and nothing else."""

    @abstractmethod
    def how_trained(self) -> HowTrained:
        """Return how the clients were trained up to now."""

    @abstractmethod
    def limit_stacks(self, most: int) -> None:
        """Train at most so many clients together; 0 sets no limit."""

    def save_states(self, folder: Path) -> None:
        """Write what nodes remember into a folder, a file each."""
        files = StateFolder(folder, range(0))
        for context in self.contexts():
            files[context.node_id - FIRST_NODE_ID] = context.state
        most = self.how_trained().most
        if most:
            (folder / STACKS).write_text(str(most))

    def restore_states(self, folder: Path) -> None:
        """Let all nodes remember what is in a folder, where `save_states` has written it.

        Stacks are not larger than they were, or a resumed run would have other bits.
        """
        most = 0
        if (folder / STACKS).exists():
            most = int((folder / STACKS).read_text())
        self.limit_stacks(most)
        saved = StateFolder(folder, {node - FIRST_NODE_ID for node in self.get_node_ids()})
        for partition in {
            *saved,
            *(context.node_id - FIRST_NODE_ID for context in self.contexts()),
        }:
            self.remember(FIRST_NODE_ID + partition, saved.get(partition, RecordDict()))


#: jobs whose clients are done, with the replies to their messages
Answered = tuple[Sequence[Job], Replies]
#: trains the clients of many training messages, whose replies the pool takes before the next ones
#: train. Jobs that fail are not among what it yields: their messages are answered one by one, and
#: say then why
Trainer = Callable[[Sequence[Job], ReplyPool], Iterator[Answered]]


class InProcessGrid(LocalGrid):
    """Runs the same ServerApp and ClientApp as Flower's engines do.

    Each node has a `Context` whose state lives as long as the grid: the memory that is needed grows
    with the nodes that stored something. A message is answered when it is pushed; what the
    ClientApp raises becomes an error reply, and what it had stored by then is lost, as in Flower.

    With `partitions` only these nodes of all are here. With `state_dir` what nodes store is kept in
    this folder, a file for each, and not in memory.

    A subclass with a trainer hands it the training messages of a push together, if the ClientApp is
    one of `client_app` without mods. That bypasses the app's handler, and calls its `client_fn` for
    up to `PORTION` nodes before the first of them trains. A client that fails is asked again, by
    its message, and is reported if it fails then.
    """

    _trainer: Trainer | None = None
    #: how a `ReplyPool` weighs replies; if empty, every client answers by itself
    _average_by = ""

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: RunConfig | None = None,
        partitions: Sequence[int] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        super().__init__()
        self._client_app = client_app
        self._run_id = self._run.run_id
        self._run_config = dict(run_config or {})
        self._how = HowTrained()
        #: by partition, the nodes' ids
        self._nodes: Sequence[int] = range(FIRST_NODE_ID, FIRST_NODE_ID + num_nodes)
        if partitions is None:
            partitions = range(num_nodes)
        # a range knows its members without a list of them
        self._partitions: Collection[int] = (
            partitions if isinstance(partitions, range) else dict.fromkeys(partitions)
        )
        #: by partition, the states that are not empty
        self._states: MutableMapping[int, RecordDict] = {}
        if state_dir is not None:
            self._states = StateFolder(state_dir, self._partitions)
            # what an earlier run left there: a node's state is empty when a run begins
            self._states.clear()

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes: they are always connected."""
        return [self._nodes[partition] for partition in self._partitions]

    def context(self, node: int) -> Context:
        """Make a node's context: a few numbers that are the same for every node, and its state."""
        partition = self._partition(node)
        return Context(
            run_id=self._run_id,
            node_id=node,
            node_config={"partition-id": partition, "num-partitions": len(self._nodes)},
            state=self._states.get(partition) or RecordDict(),
            run_config=dict(self._run_config),
        )

    def contexts(self) -> Iterator[Context]:
        """Iterate over the contexts of the nodes that remember something."""
        return (self.context(self._nodes[partition]) for partition in list(self._states))

    def how_trained(self) -> HowTrained:
        """Return how the clients were trained up to now."""
        self._how.captured, self._how.eager = captured.account()
        return self._how

    def limit_stacks(self, most: int) -> None:
        """Train at most so many clients together; 0 sets no limit."""
        self._how.most = most

    def remember(self, node: int, state: RecordDict) -> None:
        """Let a node remember this, and nothing else."""
        self._keep(node, replace(self.context(node), state=state))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages and keep the replies."""
        messages = list(messages)
        ids = [identify(message) for message in messages]
        trained = self._train_together(messages)
        # one by one: other messages, and clients that failed together with others
        for place, (message, message_id) in enumerate(zip(messages, ids, strict=True)):
            if place in trained:
                reply = trained[place]
            else:
                reply = self._answer(message)
            if reply:  # None where it is in the mean at another place
                identify(reply)
                self._replies[message_id] = reply
        return ids

    # ---- many messages at once -------------------------------------------------------------------

    def _train_together(self, messages: Sequence[Message]) -> Replies:
        """Let the trainer answer training messages, and clients those of a pass over their data.

        Return the replies of those that do not fail, by place: None where a reply is in the mean at
        another place.
        """
        if self._trainer is None or not self._hands_to_clients():
            return {}
        replies: Replies = {}
        for kind, trainer in ((MessageType.TRAIN, self._trainer), (wire.GATHER, gather_each)):
            places = [
                place
                for place, message in enumerate(messages)
                if message.metadata.message_type == kind
            ]
            if len(places) < 2:
                continue
            pool = ReplyPool(self._average_by)
            for start in range(0, len(places), PORTION):
                jobs = self._prepare(
                    {place: messages[place] for place in places[start : start + PORTION]}
                )
                for done, answers in trainer(jobs, pool):
                    replies |= answers
                    self._take_note(done)
            replies |= pool.mean()
        return replies

    def _take_note(self, done: Sequence[Job]) -> None:
        """Take note of how clients were trained, and let them keep what they remember."""
        if done[0].instruction.trains:
            self._how.sizes.add(len(done))
        for job in done:
            self._keep(job.node, job.context)

    def _prepare(self, messages: Mapping[int, Message]) -> list[Job]:
        """Make the clients of messages, given by place, except those that cannot be made."""
        assert isinstance(self._client_app, BNClientApp)
        jobs = list[Job]()
        shared = SharedRecords()
        nodes = set[int]()
        for place, message in messages.items():
            node = message.metadata.dst_node_id
            if node in nodes:
                continue  # a node's second message finds what the first has left
            nodes.add(node)
            with suppress(Exception):  # reported when the message is answered
                context = self._lend(node)
                client = self._client_app.client_fn(context)
                received = read_message(message, shared if changes_nothing(client) else None)
                jobs.append(Job(place, message, context, client, *received))
        return jobs

    # ---- one message -----------------------------------------------------------------------------

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            context = self._lend(node)
            reply = as_reply_to(message, self._client_app(self._deliver(message), context))
        except Exception as error:
            log(INFO, "The ClientApp of node %d raised", node, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        self._keep(node, context)
        if message.metadata.message_type in (MessageType.TRAIN, wire.LAYERWISE):
            self._how.sizes.add(1)
        return reply

    def _deliver(self, message: Message) -> Message:
        """Return the message as a node gets it, to change as it likes: messages of a push share
        their records.
        """
        if self._hands_to_clients():
            return message
        records: Any = message.content.items()
        copies: dict[str, Any] = {}
        for name, record in records:
            if isinstance(record, ArrayRecord):
                copies[name] = lend_record(record)
            else:
                copies[name] = type(record)(dict(record))
        return with_content(message, RecordDict(copies))

    def _hands_to_clients(self) -> bool:
        """Whether nothing but clients of this project sees messages; they leave them as they
        are.
        """
        return isinstance(self._client_app, BNClientApp) and self._client_app.is_plain

    def _lend(self, node: int) -> Context:
        """A node's context, changes to which are lost unless they are kept."""
        lent = self.context(node)
        lent.state = RecordDict(dict(lent.state))
        return lent

    def _keep(self, node: int, context: Context) -> None:
        if context.state:
            self._states[self._partition(node)] = context.state
        else:
            self._states.pop(self._partition(node), None)

    def _partition(self, node: int) -> int:
        partition = None
        if node in self._nodes:
            partition = self._nodes.index(node)
        if partition is None or partition not in self._partitions:
            raise KeyError(f"there is no node {node}")
        return partition


def as_reply_to(message: Message, answer: Any) -> Message:
    """Return what a ClientApp answers as the reply to a message.

    A mod may have made an answer of its own, such as the error of Flower's LocalDpMod, which
    replies to a reply.
    """
    if not isinstance(answer, Message):
        raise TypeError(f"a ClientApp must return a Message, not {type(answer).__name__}")
    if answer.metadata.reply_to_message_id == message.metadata.message_id:
        return answer
    if answer.has_error():
        return Message(answer.error, reply_to=message)
    return Message(answer.content, reply_to=message)


def one_by_one(jobs: Sequence[Job], pool: ReplyPool) -> Iterator[Answered]:
    """Train clients one after another, and yield the replies of those that do not fail.

    All clients are prepared before, and replies are packed afterwards.
    """
    return _pooled(_trained(jobs), pool)


def gather_each(jobs: Sequence[Job], pool: ReplyPool) -> Iterator[Answered]:
    """Yield the replies of clients whose data a pass goes over, those that do not fail."""
    return _pooled(_gathered(jobs), pool)


def _pooled(trained: Iterable[Trained], pool: ReplyPool) -> Iterator[Answered]:
    for done in trained:
        with suppress(Exception):  # reported when the message is answered
            yield done.jobs, pool.add(done)


def _trained(jobs: Sequence[Job]) -> Iterator[Trained]:
    trained: list[Trained] = []
    shared = SharedRecords()
    for job in jobs:
        client = job.client
        received = dict(job.received)
        on_device = client.device.type != "cpu" and changes_nothing(client)
        try:
            if on_device:
                received[wire.ARRAYS] = shared.read(received[wire.ARRAYS], partial(_moved, client))
            reply = client.train(received, job.instruction)
        except Exception:  # reported when the message is answered
            continue
        trained.append(Trained([job], [reply]))
        # The replies of all would fill a device's memory. And another class of client may reply
        # with tensors of its model, which the next client changes.
        if on_device or not changes_nothing(client):
            yield from trained
            trained = []
    yield from trained


def _moved(client: BNClient, received: State) -> State:
    return to_device(received, client.model.state_dict())


def _gathered(jobs: Sequence[Job]) -> Iterator[Trained]:
    for job in jobs:
        with suppress(Exception):  # reported when the message is answered
            yield Trained([job], [job.client.gather(job.received, job.instruction)])


class OneByOneGrid(InProcessGrid):
    """Trains the clients of a push one after another, without what `InProcessGrid` repeats for each
    message.

    The grid prepares all clients, then trains all of them, then packs their replies, and unpacks
    only once what all messages share. Results have the bits of `InProcessGrid`.
    """

    _trainer = staticmethod(one_by_one)


def run_in_process(
    server_main: Callable[[Grid, Context], None],
    client_app: ClientApp,
    num_nodes: int,
    run_config: RunConfig,
    make_grid: Callable[[ClientApp, int, RunConfig], Grid] | None = None,
) -> None:
    """Run a server's main function against in-process nodes, or those of another grid, such as
    `StackedGrid`.
    """
    grid = (make_grid or InProcessGrid)(client_app, num_nodes, run_config)
    context = Context(grid.run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(run_config))
    server_main(grid, context)
