"""Training messages of a push as work, and what the clients reply that have done it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from flwr.app import Context, Message

from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp.bn_client_app import make_message
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState
from fedbn_flwr.wire import Instruction


@dataclass(frozen=True)
class Job:
    """The work of one training message; `place` is the message's position in the push."""

    place: int
    message: Message
    context: Context
    client: BNClient
    received: Mapping[str, State]
    instruction: Instruction

    @property
    def node(self) -> int:
        """The node that the message is for."""
        return self.message.metadata.dst_node_id

    @cached_property
    def steps(self) -> int:
        """The number of mini-batch steps; an error if the job cannot be planned."""
        return len(self.client.batch_sizes(self.instruction))


@dataclass(frozen=True)
class Trained:
    """Jobs whose clients have trained, and their replies: of one client, or those of a stack without records."""

    jobs: Sequence[Job]
    replies: Sequence[Reply]
    #: the records of a stack's replies, with a row for each client
    stacked: Mapping[str, State] = field(default_factory=dict)

    def messages(self) -> dict[int, Message | None]:
        """Make a message of each client's reply, by place."""
        groups = {name: FlatState.copies_of(values, len(self.jobs)) for name, values in self.stacked.items()}
        messages: dict[int, Message | None] = {}
        for row, (job, reply) in enumerate(zip(self.jobs, self.replies, strict=True)):
            whole = replace(reply, records={**reply.records, **{name: rows[row] for name, rows in groups.items()}})
            messages[job.place] = make_message(whole, job.message, copy=not changes_nothing(job.client))
        return messages

    def rows(self) -> Mapping[str, State]:
        """Return the records with a row for each client, also where there is one client."""
        alone = self.replies[0].records
        single = {group: {name: value[None] for name, value in values.items()} for group, values in alone.items()}
        return {**single, **self.stacked}


def changes_nothing(client: BNClient) -> bool:
    """Whether a client surely changes no tensor that it received or replied, so that none needs to be copied."""
    return type(client) is BNClient
