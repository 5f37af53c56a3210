"""Waiting for what other threads and processes do, so long that only an error, and no busy machine,
ends it.
"""

import time
from collections.abc import Callable

#: seconds until a test gives up; only tests that fail wait so long
PATIENCE = 600.0


def wait_until(
    condition: Callable[[], bool], pause: float = 0.02, patience: float = PATIENCE
) -> bool:
    """Return whether the condition came true before patience ran out."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
