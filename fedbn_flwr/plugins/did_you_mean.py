"""The second half of the error for a name that does not exist: what was meant, or what there is."""

from collections.abc import Iterable
from difflib import get_close_matches

#: how alike two names are, from 0 to 1, to count as a slip: `fedsgd` and `fedbs` are not, at 0.73
ALIKE = 0.75


def did_you_mean(name: str, known: Iterable[str], other: str = "") -> str:
    """Return "did you mean ...?", or all known names if none is like this one.

    Case, hyphens, and all after a colon do not count. `other` says what may be given in place of a name.
    """
    listed = list(known)
    names = {_plain(item): item for item in listed}
    if meant := get_close_matches(_plain(name), names, n=1, cutoff=ALIKE):
        return f"did you mean {names[meant[0]]!r}?"
    return f"known: {', '.join(filter(None, (*listed, other))) or 'none'}"


def _plain(name: str) -> str:
    return name.partition(":")[0].lower().replace("-", "").replace("_", "")
