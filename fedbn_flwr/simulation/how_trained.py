"""How the clients of a simulation were trained."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

#: what is logged before a reason
APART = "Clients train one after another, or in smaller stacks: "


@dataclass
class HowTrained:
    """In how many processes clients were trained, together or alone, and why not otherwise."""

    processes: int = 1
    #: sizes of the stacks; 1 is that of a client alone
    sizes: set[int] = field(default_factory=set)
    #: why clients that could train in a stack, or in a larger one, did not
    alone: set[str] = field(default_factory=set)
    #: the largest stack that is tried, since a larger one did not fit; 0 before
    most: int = 0
    #: whether steps were captured, and why others were not
    captured: bool = False
    eager: set[str] = field(default_factory=set)

    @classmethod
    def together(cls, parts: Iterable[Self]) -> Self:
        """Return how the clients of several processes were trained."""
        whole = cls(processes=0)
        for part in parts:
            whole.processes += part.processes
            whole.sizes |= part.sizes
            whole.alone |= part.alone
            if part.most:
                whole.most = min(part.most, whole.most or part.most)
            whole.captured |= part.captured
            whole.eager |= part.eager
        return whole

    def summary(self, engine: str) -> dict[str, Any]:
        """Return what a run's summary says: reasons only where there are some, and nothing if no
        client took a step.
        """
        parts = [engine, "1 process" if self.processes == 1 else f"{self.processes} processes"]
        stacks = sorted(self.sizes - {1}, reverse=True)
        if stacks:
            parts.append(f"stacks of {', '.join(map(str, stacks))}")
        if 1 in self.sizes:
            parts.append("clients alone")
        if self.captured:
            parts.append("captured steps")
        summary: dict[str, Any] = {}
        if self.sizes:
            summary["trained-by"] = ", ".join(parts)
        if self.alone:
            summary["trained-alone"] = sorted(self.alone)
        if self.eager:
            summary["not-captured"] = sorted(self.eager)
        return summary
