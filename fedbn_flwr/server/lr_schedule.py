"""Learning rates over the rounds: factors at fractions of a run, values from a round on, and from the freeze on."""

from dataclasses import dataclass
from math import isfinite, nan

GRAMMAR = (
    "a learning-rate schedule is a comma-separated list of FACTOR@WHEN or =VALUE@WHEN, where WHEN is a fraction of "
    "the rounds (0.5), a number of rounds after which it holds (100) or 'freeze'"
)


@dataclass(frozen=True)
class Moment:
    """A point in a run: a fraction of its rounds, a number of rounds, or the freeze."""

    fraction: float | None = None
    rounds: int | None = None

    def after(self, num_rounds: int | None) -> int | None:
        """The round after which this point lies; none for the freeze, which is not known beforehand."""
        if self.fraction is None:
            return self.rounds
        # a fraction of a very short run is not its start: nothing would have been trained by then
        return max(rounds_of(self.fraction, num_rounds), 1)

    def reached(self, server_round: int, num_rounds: int | None, frozen_after: int | None) -> bool:
        """Whether a round, counted from 1, comes after this point."""
        after = self.after(num_rounds)
        after = frozen_after if after is None else after
        return after is not None and server_round > after


@dataclass(frozen=True)
class Change:
    """Set or multiply the rate from a moment on."""

    moment: Moment
    number: float
    absolute: bool


@dataclass(frozen=True)
class Schedule:
    """A constant rate where there are no changes."""

    changes: tuple[Change, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read e.g. `0.1@0.5,0.1@0.75`, or `=0.001@freeze`."""
        return cls(tuple(_change(item.strip()) for item in text.split(",") if item.strip()))

    @property
    def names_freeze(self) -> bool:
        """Whether the schedule names the freeze."""
        return any(change.moment == Moment() for change in self.changes)

    def rate(self, base: float, server_round: int, num_rounds: int | None, frozen_after: int | None = None) -> float:
        """The rate of a round, counted from 1."""
        rate = base
        for change in self.changes:
            if change.moment.reached(server_round, num_rounds, frozen_after):
                rate = change.number if change.absolute else rate * change.number
        return rate


def rounds_of(fraction: float, num_rounds: int | None) -> int:
    """Return the number of rounds of a fraction of a run."""
    if num_rounds is None:
        raise ValueError(
            f"the fraction {fraction} of a run needs the number of rounds: start the strategy with "
            "`start(num_rounds=...)`, or put `num-rounds` into `train_config`"
        )
    return round(fraction * num_rounds)


def moment(text: str) -> Moment:
    """Read a fraction between 0 and 1, or a number of rounds."""
    number = _read(text)
    if 0 < number < 1:
        return Moment(fraction=number)
    if number >= 0 and number == int(number):
        return Moment(rounds=int(number))
    raise ValueError(f"{text!r} is neither a fraction between 0 and 1 nor a number of rounds")


def _change(item: str) -> Change:
    number, _, when = item.partition("@")
    absolute = number.startswith("=")
    try:
        rate = _read(number.removeprefix("="))
        if rate < 0:
            raise ValueError("a rate must not be negative")
        return Change(Moment() if when == "freeze" else moment(when), rate, absolute)
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
