"""A federation of real machines: keys and configuration for its server and its sites, checks,
status and results.

Nothing here imports PyTorch before a command needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DeploymentError(ValueError):
    """Bad input or a state that a command cannot work with.

    One line that names it and what is allowed.
    """


@contextmanager
def using(path: Path, advice: str = "") -> Iterator[None]:
    """Let a DeploymentError name the file that the block reads and understands, if it cannot.

    People edit these files by hand, and copy them from machine to machine.
    """
    try:
        yield
    except DeploymentError:
        raise
    except OSError as error:
        raise DeploymentError(f"{path} cannot be read ({error.strerror}){advice}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DeploymentError(f"{path} is damaged, or another file ({reason}){advice}") from error


def read_text(path: Path, advice: str = "") -> str:
    """Read a file; a DeploymentError says why this cannot be, and gives advice."""
    with using(path, advice):
        return path.read_text()


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """Read what a variable of this name says of a server."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise DeploymentError(f"{name} must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
