"""The in-process `Grid` that trains clients as one stack of models, where it can."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from logging import INFO
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr.client import Reply
from fedbn_flwr.client.layerwise_step import Replicas
from fedbn_flwr.clientapp import pack
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.simulation.prepared import Job, PreparedGrid
from fedbn_flwr.simulation.sequential import Config, identify
from fedbn_flwr.simulation.spill import SpillBuffer
from fedbn_flwr.simulation.stacked.jobs import count_steps, stack_key, trial_key, why_not_stackable
from fedbn_flwr.simulation.stacked.layerwise_step import StackedLayerwiseStep
from fedbn_flwr.simulation.stacked.memory_budget import StepMemory, clients_that_fit, largest_useful_stack
from fedbn_flwr.simulation.stacked.training import train_together
from fedbn_flwr.wire.layerwise import StepPosition
from fedbn_flwr.wire.layerwise_grid import Participant

#: clients that can wait in the middle of a layer-wise step where there is memory to train one: they have no reply yet,
#: and most of them no gradients
WAITING_PER_TRAINING = 2


class StackedGrid(PreparedGrid):
    """Trains clients that share a model and an instruction at once, as a stack of models.

    Results are those of `InProcessGrid` up to rounding, and the same bits whenever the same messages come again. Other
    clients train one after another, and the log says why, once: a ClientApp that `client_app` did not make, a model of
    each client's own, layers that `torch.func.vmap` refuses.

    At most `chunk` clients are stacked; by default as many as speed up a step and fit into half of the machine's
    memory. (Free memory does not count, or the bits of a run would depend on what else runs.)
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Config | None = None,
        partitions: Sequence[int] | None = None,
        state_dir: Path | None = None,
        *,
        chunk: int = 0,
    ) -> None:
        super().__init__(client_app, num_nodes, run_config, partitions, state_dir)
        self._given_chunk, self._num_nodes = chunk, num_nodes
        #: by the id of a model, what a step keeps in memory
        self._steps: dict[int, StepMemory] = {}
        self._unstackable: set[Hashable] = set()
        self._logged: set[str] = set()
        #: copies of models, for steps that wait in the middle of a pass
        self._structures = Replicas()

    def open_step(self, messages: Sequence[Message]) -> StackedLayerwiseStep | None:
        """Open the layer-wise step that these messages begin, if all of their nodes can take it in stacks."""
        if not self._hands_to_clients() or StepPosition.of(messages[0].content).phase != "exchange":
            return None
        for message in messages:
            identify(message)
        stacks = [
            chunk
            for group in self._group(self._jobs(dict(enumerate(messages))))
            for chunk in self._chunks(group, layerwise=True)
        ]
        if sum(map(len, stacks)) < len(messages) or any(trial_key(chunk[0]) in self._unstackable for chunk in stacks):
            return None
        if len(messages) > WAITING_PER_TRAINING * self._fitting(stacks[0][0]):
            self._log_once(f"a layer-wise step of all {len(messages)} takes more memory than there is")
            return None
        steps = [([job.place for job in chunk], self._step_of(chunk)) for chunk in stacks]
        jobs = {job.place: job for chunk in stacks for job in chunk}
        participants = {
            place: Participant(job.client.partition_id, job.node, len(job.client.indices))
            for place, job in jobs.items()
        }
        return StackedLayerwiseStep(steps, participants, lambda replies: self._close_step(jobs, replies))

    def _step_of(self, jobs: Sequence[Job]) -> Callable[[Exchange], list[Reply]]:
        """Return the training of a stack as a function of its exchange; it uses a copy of the model."""

        def train(exchange: Exchange) -> list[Reply]:
            client, instruction = jobs[0].client, jobs[0].instruction
            structure = self._structures.take(client.model)
            clients, received = [job.client for job in jobs], [job.received for job in jobs]
            try:
                return train_together(clients, structure, received, instruction, exchange)
            except Exception:
                self._unstackable.add(trial_key(jobs[0]))
                raise
            finally:
                self._structures.give_back(client.model, structure)

        return train

    def _close_step(self, jobs: Mapping[int, Job], replies: Mapping[int, Reply]) -> list[Message]:
        """Make messages of the replies, in the order of the messages that opened the step."""
        self._spill = SpillBuffer()
        messages = [self._spill.store(pack(replies[place], jobs[place].message, copy=False)) for place in sorted(jobs)]
        for job in jobs.values():
            self._keep(job.node, job.context)
        for message in messages:
            identify(message)
        return messages

    def _hands_to_clients(self) -> bool:
        answer = super()._hands_to_clients()
        if not answer:
            self._log_once("the ClientApp was not made by `client_app`, or has mods")
        return answer

    def _train(self, messages: dict[int, Message]) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        jobs = self._jobs(messages)
        alone = {job.place: job for job in jobs}
        for group in self._group(jobs):
            for chunk in self._chunks(group):
                if len(chunk) > 1 and trial_key(chunk[0]) not in self._unstackable:
                    answers |= self._train_stack(chunk)
                    for job in chunk:
                        del alone[job.place]
        return answers | self._train_in_turn(list(alone.values()))

    def _train_stack(self, jobs: Sequence[Job]) -> dict[int, Message]:
        """Train clients at once; return their replies by place, none if they turn out not to stack."""
        try:
            clients, received = [job.client for job in jobs], [job.received for job in jobs]
            replies = train_together(clients, jobs[0].client.model, received, jobs[0].instruction)
        except Exception as error:
            self._unstackable.add(trial_key(jobs[0]))
            self._log_once(f"{type(error).__name__}: {error}")
            return {}
        return {job.place: self._pack(job, reply) for job, reply in zip(jobs, replies, strict=True)}

    def _group(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Put jobs together that can be stacked."""
        groups: dict[Hashable, list[Job]] = {}
        for job in jobs:
            try:
                key = stack_key(job)
            except Exception:  # reported when the message is answered
                continue
            groups.setdefault(key, []).append(job)
        for key, group in list(groups.items()):
            if reason := why_not_stackable(group[0]):
                self._log_once(reason)
                del groups[key]
        if len(groups) > 1 and len({id(group[0].client.model) for group in groups.values()}) == len(jobs):
            self._log_once("each has a model of its own")
        return list(groups.values())

    def _chunks(self, jobs: list[Job], layerwise: bool = False) -> list[list[Job]]:
        """Cut a group into stacks of clients with similar numbers of steps, the largest numbers first."""
        if len(jobs) == 1:
            return [jobs]
        size = self._given_chunk or self._useful(jobs[0], layerwise)
        ordered = sorted(jobs, key=lambda job: -count_steps(job))
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def _useful(self, job: Job, layerwise: bool) -> int:
        """Return the largest stack of clients like this one that speeds up a step and fits into memory."""
        client = job.client
        most = largest_useful_stack(client.model, client.device, lambda: self._step_memory(job), layerwise)
        return min(most, self._fitting(job)) if most > 1 else 1

    def _fitting(self, job: Job) -> int:
        """Return how many clients like this one fit into memory, next to those in other processes of this machine."""
        share = len(self._contexts) / self._num_nodes
        return max(int(clients_that_fit(self._step_memory(job), job.client.device) * share), 1)

    def _step_memory(self, job: Job) -> StepMemory:
        """Return what a step keeps in memory, looked at once for each model."""
        model = id(job.client.model)
        if model not in self._steps:
            self._steps[model] = StepMemory.of(job.client, job.instruction)
        return self._steps[model]

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log(INFO, "Clients train one after another: %s", " ".join(reason.split()))
