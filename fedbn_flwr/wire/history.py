"""The history of a run that was resumed: nodes that keep states of their own must know which of them still count."""

from dataclasses import dataclass, replace
from typing import Self

#: Flower's numbers of the runs that went on with each other, as `number:last round,...,number`
STATE_HISTORY = "state-history"
#: the round of the last checkpoint
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class History:
    """The runs that went on with each other, oldest first, each up to the round from which the next one went on."""

    earlier: tuple[tuple[str, int], ...]
    present: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `to_text` returned; the number of a run is the history of a run from the start."""
        *earlier, present = text.split(",")
        parts = [part.partition(":") for part in earlier]
        return cls(tuple((number, int(last)) for number, _, last in parts), present)

    def to_text(self) -> str:
        """Return the value of `STATE_HISTORY`."""
        return ",".join([*(f"{number}:{last}" for number, last in self.earlier), self.present])

    def then(self, server_round: int, run: int) -> Self:
        """Return the history of another run that goes on after a round of this one."""
        return replace(self, earlier=(*self.earlier, (self.present, server_round)), present=str(run))

    @property
    def first(self) -> str:
        """The first run, by whose number states are kept."""
        return self.earlier[0][0] if self.earlier else self.present

    def place(self, run: str, server_round: int) -> tuple[int, int] | None:
        """Return what sorts the rounds that count; None for a round that was done again, or of a run beside."""
        for index, (number, last) in enumerate(self.earlier):
            if number == run:
                return (index, server_round) if server_round <= last else None
        return (len(self.earlier), server_round) if run == self.present else None
