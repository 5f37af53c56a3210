"""A federation of real machines: keys and configuration for its server and its sites, checks,
status and results.

Nothing here imports PyTorch before a command needs it.
"""

from pathlib import Path


class DeploymentError(ValueError):
    """Bad input or a state that a command cannot work with.

    One line that names it and what is allowed.
    """


def read_text(path: Path, advice: str) -> str:
    """Read a file; a DeploymentError says why this cannot be, and gives advice."""
    try:
        return path.read_text()
    except OSError as error:
        raise DeploymentError(f"{path} cannot be read ({error.strerror}){advice}") from error
