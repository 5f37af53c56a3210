"""Files that are replaced as a whole: a reader finds what was in them, or what is."""

import os
from pathlib import Path


def write_bytes(path: Path, content: bytes, durable: bool = False) -> None:
    """Replace a file. Under its name a file is always whole, wherever this process ends.

    With `durable` that also holds where the machine ends.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    if durable:
        sync(partial)
    partial.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
