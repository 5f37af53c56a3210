"""The history of a run that was resumed: nodes that keep states of their own must know which of
them still count.
"""

from dataclasses import dataclass, replace
from typing import Self

from flwr.app import ConfigRecord, Context

from fedbn_flwr.plugins.options import UsageError

#: Flower's numbers of the runs that went on with each other, as `number:last round,...,number`
STATE_HISTORY = "state-history"
#: the round of the last checkpoint
CHECKPOINT = "checkpoint"


def path_number(name: str, value: object) -> int:
    """Return a number that becomes a part of a file's path; UsageError for anything else."""
    if not str(value).isdecimal():
        raise UsageError(f"{name} must be a number from 0 on, got {str(value)[:40]!r}")
    return int(str(value))


def site_number(context: Context) -> int:
    """Return a site's number; without one that of its node, which is another one after a restart
    without a key.
    """
    return path_number("partition-id", context.node_config.get("partition-id", context.node_id))


@dataclass(frozen=True)
class History:
    """The runs that went on with each other, oldest first, each up to the round from which the next
    one went on.
    """

    earlier: tuple[tuple[str, int], ...]
    present: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `to_text` returned.

        The number of a run is the history of a run from the start.
        """
        *earlier, present = text.split(",")
        runs = []
        for part in earlier:
            run, _, last = part.partition(":")
            runs.append((str(path_number(STATE_HISTORY, run)), path_number(STATE_HISTORY, last)))
        return cls(tuple(runs), str(path_number(STATE_HISTORY, present)))

    @classmethod
    def read(cls, config: ConfigRecord, context: Context) -> Self:
        """Read what the server says of the present run."""
        history = cls.parse(str(config.get(STATE_HISTORY) or context.run_id))
        if history.present != str(context.run_id):
            raise UsageError(
                f"{STATE_HISTORY} is that of run {history.present}, and this is run "
                f"{context.run_id}"
            )
        return history

    def to_text(self) -> str:
        """Return the value of `STATE_HISTORY`."""
        return ",".join([*(f"{number}:{last}" for number, last in self.earlier), self.present])

    def then(self, server_round: int, run: int) -> Self:
        """Return the history of another run that goes on after a round of this one."""
        return replace(
            self, earlier=(*self.earlier, (self.present, server_round)), present=str(run)
        )

    @property
    def first(self) -> str:
        """The first run, by whose number states are kept."""
        if self.earlier:
            return self.earlier[0][0]
        return self.present

    def place(self, run: str, server_round: int) -> tuple[int, int] | None:
        """Return what sorts the rounds that count; None for a round that was done again, or of a
        run beside.
        """
        for index, (number, last) in enumerate(self.earlier):
            if number == run:
                if server_round <= last:
                    return (index, server_round)
                return None
        if run == self.present:
            return (len(self.earlier), server_round)
        return None
