"""The numbers of one kind of traffic."""

from dataclasses import dataclass


@dataclass
class Tally:
    """Numbers of one kind of traffic."""

    #: messages sent to nodes and answered, all nodes of one push counting as one exchange
    exchanges: int = 0
    #: bytes of the arrays' numbers, server to nodes and nodes to server, every node counted
    payload_down: int = 0
    payload_up: int = 0
    #: payload as papers count it: what goes to several nodes once, and batch counters not at all
    paper: int = 0

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    def copy(self) -> "Tally":
        """The numbers as they are now."""
        return Tally(**vars(self))

    @property
    def payload(self) -> int:
        """Bytes in both directions."""
        return self.payload_down + self.payload_up
