"""The health check of a container: does its server answer, or is its client connected?

Reads `FEDBN_HEALTH`: `answers URL CA_FILE`, or `connected PORT` for an established TCP connection
to that remote port. A SuperNode that lives but cannot reach its server has none, a SuperExec
without its SuperNode neither. `accepted PORT FILE` also wants the file that a SuperNode makes when
its server has accepted it.
"""

import os
import ssl
import sys
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

#: seconds to wait for an answer
PATIENCE = 5.0
#: in the fourth column of /proc/net/tcp
_ESTABLISHED = "01"
_VARIABLE = "FEDBN_HEALTH"


def main() -> int:
    """Print whether the service is healthy, and return 0 if it is."""
    try:
        print(check_health(os.environ.get(_VARIABLE, "")))
    except (OSError, ValueError) as error:
        print(f"unhealthy: {error}", file=sys.stderr)
        return 1
    return 0


def check_health(wanted: str) -> str:
    """Return what is well; raise what is not."""
    match wanted.split():
        case ["answers", url, ca]:
            return f"{url} answers {_status(url, ca)}"
        case ["accepted", port, file]:
            if not Path(file).exists():
                raise ValueError(
                    "the server has not accepted this node: its key is not registered, or not yet "
                    "again"
                )
            return check_health(f"connected {port}")
        case ["connected", port] if port.isdecimal():
            tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
            if any(connected(path.read_text(), int(port)) for path in tables if path.exists()):
                return f"connected to port {port}"
            raise ValueError(f"there is no connection to port {port}")
        case []:
            return "nothing to check"
        case _:
            raise ValueError(
                f"{_VARIABLE} must be `answers URL CA_FILE`, `connected PORT` or `accepted PORT "
                f"FILE`, got {wanted!r}"
            )


def note_accepted(accepted: bool) -> None:
    """Make or remove the file that `accepted PORT FILE` names; without such a check, do nothing."""
    match os.environ.get(_VARIABLE, "").split():
        case ["accepted", _, file] if accepted:
            Path(file).touch()
        case ["accepted", _, file]:
            Path(file).unlink(missing_ok=True)


def _status(url: str, ca: str) -> int:
    try:
        with urlopen(
            url, timeout=PATIENCE, context=ssl.create_default_context(cafile=ca)
        ) as answer:
            return int(answer.status)
    except HTTPError as error:
        # a door that wants a key is there
        if error.code == HTTPStatus.UNAUTHORIZED:
            return error.code
        raise


def connected(table: str, port: int) -> bool:
    """Whether a table of the kernel's TCP sockets has an established connection to a remote
    port.
    """
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(
        int(row[2].rpartition(":")[2], 16) == port and row[3] == _ESTABLISHED for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
