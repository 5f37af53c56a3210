"""The memory of a node between messages: named groups of tensors in its `Context.state`."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr.state import State, from_record, to_record
from fedbn_flwr.wire import STAYS, Record

NAMESPACE = "fedbn-flwr"
#: where a site names the folder for states: in its SuperNode's node configuration, or in the
#: environment of its ClientApps
NODE_KEY = "state-dir"
STATE_VARIABLE = "FEDBN_FLWR_STATE"


def state_folder(context: Context) -> Path | None:
    """Return the folder in which a site keeps what its node remembers; None where it names none."""
    folder = str(context.node_config.get(NODE_KEY) or os.environ.get(STATE_VARIABLE, ""))
    return Path(folder) if folder else None


class Memory:
    """The part of a `Context.state` that belongs to this project."""

    def __init__(self, records: RecordDict) -> None:
        self._records = records

    def recall(self, group: str) -> State:
        """Return the tensors stored under this name; none if there are none."""
        record = self._records.array_records.get(f"{NAMESPACE}/{group}")
        return {} if record is None else from_record(record)

    def store(self, group: str, values: State) -> None:
        """Store, in place of what was there."""
        self._records[f"{NAMESPACE}/{group}"] = to_record(values)

    def personal(self, names: Collection[str]) -> State:
        """The personal entries of the model among these names; empty at a node's first message."""
        if names:
            return {name: value for name, value in self.recall(STAYS).items() if name in names}
        return {}

    def keep(self, name: str, record: Record) -> None:
        """Store a record as it is."""
        self._records[f"{NAMESPACE}/{name}"] = record

    def kept(self, prefix: str) -> Iterator[tuple[str, Record]]:
        """The records whose names begin so, by the rest of their names."""
        start = f"{NAMESPACE}/{prefix}"
        for name, record in list(self._records.items()):
            if name.startswith(start):
                yield name.removeprefix(start), record

    def record(self, name: str) -> Mapping[str, Any]:
        """The record that was stored under this name; empty if there is none."""
        record: Any = self._records.get(f"{NAMESPACE}/{name}", {})
        return dict(record)

    def forget(self, prefix: str) -> None:
        """Remove the records whose names begin so."""
        for name in [name for name in self._records if name.startswith(f"{NAMESPACE}/{prefix}")]:
            del self._records[name]

    def attach(self, records: RecordDict) -> None:
        """Go on with another `Context.state`: the one that came with a later message."""
        self._records = records

    def adopt(self, records: RecordDict) -> None:
        """Store what others keep in another `Context.state`, which may be that of an earlier
        message.
        """
        theirs = {
            name: record for name, record in records.items() if not name.startswith(f"{NAMESPACE}/")
        }
        for name in [name for name in self._records if not name.startswith(f"{NAMESPACE}/")]:
            del self._records[name]
        self._records.update(theirs)
