"""Flower's records as bytes, and in files."""

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
