"""The peak memory of a process and of those that it started, as far as the system tells (Linux
does).
"""

import os
import resource
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

#: written to a process's `clear_refs`, it makes the present memory the peak
FORGET = "5"


def own_family() -> list[int]:
    """This process, those that it had forked from a server of forks, and all their living
    descendants.
    """
    forked = (child.pid for child in active_children())
    return [member for process in (os.getpid(), *forked) if process for member in family(process)]


def family(process: int) -> list[int]:
    """A process and its living descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            parents[int(folder.name)] = _status(int(folder.name)).get("PPid", 0)
    processes = [process]
    for member in processes:
        processes += [child for child, parent in parents.items() if parent == member]
    return processes


def peak_megabytes() -> float:
    """The sum of the peaks of the own family, each since `forget_peak`.

    Of pages that several processes share at the end, each has its part: so many were one when the
    others were forked.
    """
    kilobytes = 0
    for member in own_family():
        with suppress(OSError):
            sizes = held(member)
            kilobytes += _status(member).get("VmHWM", 0) - sizes.get("Rss", 0) + sizes.get("Pss", 0)
    return (kilobytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024


def forget_peak() -> None:
    """Count from now on."""
    for member in own_family():
        with suppress(OSError):
            Path(f"/proc/{member}/clear_refs").write_text(FORGET)


def lives(process: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        os.kill(process, 0)
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # no such folder on this system
        return True


def held(process: int) -> dict[str, int]:
    """Return the kilobytes that a process holds: all (Rss), and its part of what others have too
    (Pss).

    Empty where the system does not tell, or the process has ended.
    """
    try:
        return _numbers(Path(f"/proc/{process}/smaps_rollup").read_text())
    except OSError:
        return {}


def _status(process: int) -> dict[str, int]:
    return _numbers(Path(f"/proc/{process}/status").read_text())


def _numbers(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {
        words[0].rstrip(":"): int(words[1])
        for words in pairs
        if len(words) > 1 and words[1].isdecimal()
    }
