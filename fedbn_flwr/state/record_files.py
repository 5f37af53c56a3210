"""Flower's records in files, which are replaced as a whole."""

import os
from pathlib import Path

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

SUFFIX = ".records"


def pack_records(records: RecordDict) -> bytes:
    """Return the bytes of records."""
    return bytes(recorddict_to_proto(records).SerializeToString())


def unpack_records(content: bytes) -> RecordDict:
    """Return the records of these bytes; an error if they have none."""
    return recorddict_from_proto(ProtoRecordDict.FromString(content))


def read_records(path: Path) -> RecordDict:
    """Return the records of a file."""
    return unpack_records(path.read_bytes())


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
