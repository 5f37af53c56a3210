"""The contexts of the nodes of one process: made when a node is addressed, what they store in memory or on disk."""

from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr.state.record_files import SUFFIX, pack_records, read_records, write_bytes

#: Flower reserves small ids for its own parts
FIRST_NODE_ID = 1000


class Contexts(MutableMapping[int, Context]):
    """A context for each node, by its id, of which only what is not empty is kept.

    A context is otherwise the same few numbers for every node, so the memory that is needed grows with the nodes that
    stored something, and with a folder not even with them.
    """

    def __init__(
        self,
        run_id: int,
        partitions: Sequence[int],
        num_partitions: int,
        run_config: Mapping[str, Any],
        folder: Path | None = None,
    ) -> None:
        self._run_id, self._num_partitions, self._run_config = run_id, num_partitions, run_config
        # a range knows its members without a list of them
        self._partitions = partitions if isinstance(partitions, range) else dict.fromkeys(partitions)
        self._states: MutableMapping[int, RecordDict] = {} if folder is None else StateFolder(folder, self._partitions)
        # what an earlier run left there: a node's state is empty when a run begins
        self._states.clear()

    def __getitem__(self, node: int) -> Context:
        partition = self._partition(node)
        return Context(
            run_id=self._run_id,
            node_id=node,
            node_config={"partition-id": partition, "num-partitions": self._num_partitions},
            state=self._states[partition] if partition in self._states else RecordDict(),
            run_config=dict(self._run_config),
        )

    def __setitem__(self, node: int, context: Context) -> None:
        if context.state:
            self._states[self._partition(node)] = context.state
        else:
            del self[node]

    def __delitem__(self, node: int) -> None:
        self._states.pop(self._partition(node), None)

    def __iter__(self) -> Iterator[int]:
        return map(FIRST_NODE_ID.__add__, self._partitions)

    def __len__(self) -> int:
        return len(self._partitions)

    def remembering(self) -> list[int]:
        """Return the nodes whose state is not empty."""
        return [FIRST_NODE_ID + partition for partition in self._states]

    def _partition(self, node: int) -> int:
        if node - FIRST_NODE_ID not in self._partitions:
            raise KeyError(f"there is no node {node}")
        return node - FIRST_NODE_ID


class StateFolder(MutableMapping[int, RecordDict]):
    """A folder of the nodes' states: a file for each partition, replaced as a whole."""

    def __init__(self, folder: Path, partitions: Container[int]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # other processes may have partitions of their own in the same folder
        self._partitions = partitions
        self._stored = {partition for partition, path in self._files() if path.suffix == SUFFIX}

    def __getitem__(self, partition: int) -> RecordDict:
        if partition not in self._stored:
            raise KeyError(partition)
        return read_records(self._path(partition))

    def __setitem__(self, partition: int, state: RecordDict) -> None:
        write_bytes(self._path(partition), pack_records(state))
        self._stored.add(partition)

    def __delitem__(self, partition: int) -> None:
        self._stored.remove(partition)
        self._path(partition).unlink()

    def __contains__(self, partition: object) -> bool:
        return partition in self._stored

    def __iter__(self) -> Iterator[int]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def clear(self) -> None:
        """Remove the files, whatever is in them, also those that are not whole."""
        for _, path in self._files():
            path.unlink()
        self._stored.clear()

    def _files(self) -> list[tuple[int, Path]]:
        named = [(path.name.partition(".")[0], path) for path in self._folder.glob(f"*{SUFFIX}*")]
        return [(int(name), path) for name, path in named if name.isdecimal() and int(name) in self._partitions]

    def _path(self, partition: int) -> Path:
        return self._folder / f"{partition}{SUFFIX}"
