"""Learning rates over the rounds: factors, values and curves from fractions or numbers of rounds
on, or the freeze.
"""

from dataclasses import dataclass
from math import cos, isfinite, nan, pi

GRAMMAR = (
    "a learning-rate schedule is a comma-separated list of FACTOR@WHEN, =VALUE@WHEN, warmup@WHEN "
    "or cosine@WHEN, where WHEN is a fraction of the rounds (0.5), a number of rounds after which "
    "it holds (100) or 'freeze'"
)


@dataclass(frozen=True)
class RateChange:
    """A change of the rate: after a moment `=` sets it, `*` multiplies it, and `cosine` takes it to
    0 at the end.

    `warmup` is linear, and over at its moment.
    """

    #: see `moment`; None is the freeze
    when: float | None
    kind: str
    number: float = 1.0

    def start(self, num_rounds: int | None, frozen_after: int | None) -> int | None:
        """Return the round after which the moment lies; none if that is a freeze that has not
        come.
        """
        if self.when is None:
            return frozen_after
        return round_of(self.when, num_rounds)

    def rate(
        self, before: float, server_round: int, num_rounds: int | None, frozen_after: int | None
    ) -> float:
        """Return the rate of a round, counted from 1, whose rate is `before` without the change."""
        start = self.start(num_rounds, frozen_after)
        if self.kind == "warmup":
            return before * min(server_round / (start or 1), 1.0)
        if start is None or server_round <= start:
            return before
        if self.kind == "cosine":
            share = (server_round - 1 - start) / (share_in_rounds(1.0, num_rounds) - start)
            return before * (1 + cos(pi * min(share, 1.0))) / 2
        if self.kind == "=":
            return self.number
        return before * self.number


def read_schedule(text: str) -> tuple[RateChange, ...]:
    """Read e.g. `0.1@0.5,0.1@0.75`, `=0.001@freeze`, or `warmup@5,cosine@5`; without changes, the
    rate is constant.
    """
    return tuple(_change(item.strip()) for item in text.split(",") if item.strip())


def share_in_rounds(fraction: float, num_rounds: int | None) -> int:
    """Return the number of rounds of a fraction of a run."""
    if num_rounds is None:
        raise ValueError(
            f"the fraction {fraction} of a run needs the number of rounds: start the strategy with "
            "`start(num_rounds=...)`, or put `num-rounds` into `train_config`"
        )
    return round(fraction * num_rounds)


def round_of(when: float, num_rounds: int | None) -> int:
    """Return the round after which a moment lies."""
    # a fraction of a very short run is not its start: nothing would have been trained by then
    if 0 < when < 1:
        return max(share_in_rounds(when, num_rounds), 1)
    return int(when)


def moment(text: str) -> float:
    """Read a moment of a run: a fraction between 0 and 1, or a number of rounds."""
    number = _read(text)
    if 0 < number < 1 or (number >= 0 and number == int(number)):
        return number
    raise ValueError(f"{text!r} is neither a fraction between 0 and 1 nor a number of rounds")


def _change(item: str) -> RateChange:
    kind, _, when = item.partition("@")
    try:
        if item == "cosine":
            return RateChange(0, item)
        at = None if when == "freeze" else moment(when)
        if kind in ("cosine", "warmup"):
            return RateChange(at, kind)
        change = RateChange(at, "=" if kind.startswith("=") else "*", _read(kind.removeprefix("=")))
        if change.number < 0:
            raise ValueError("a rate must not be negative")
        return change
    except ValueError as error:
        raise ValueError(f"cannot read {item!r}: {GRAMMAR} ({error})") from None


def _read(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ValueError(f"{text!r} is not a number")
    return number
