"""A site's record of what leaves it: a line of JSON for each message that its SuperNode sends.

The SuperNode keeps it, so no app can change it or leave something out; a message that cannot be
recorded is not sent.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from errno import ENOSPC
from os import SEEK_END, strerror
from pathlib import Path
from threading import Lock
from typing import Any

from flwr.app import Message, RecordDict

#: stands for a line that cannot be read, such as one that a machine wrote when its power failed
BROKEN: dict[str, Any] = {
    "run": "unknown",
    "round": 0,
    "message": "unreadable lines",
    "app": "",
    "bytes": 0,
}
#: the record with the layouts of packed arrays (`fedbn_flwr.wire.packed`, which needs torch, and a
#: SuperNode has none)
_PACKED = "packed"


@dataclass(frozen=True)
class Asked:
    """A message that the site has received."""

    kind: str
    #: the round that it belongs to; 0 for none
    server_round: int
    #: the hash of the run's app
    app: str
    run: str = "unknown"


class SentLog:
    """Appends to a file; without a file it records nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = Lock()
        #: what is not answered yet, by the message's id, and the latest step that takes the side
        #: channel
        self.asked: dict[str, Asked] = {}
        self._step = Asked("", 0, "")

    def record(self, message: Message, sent: Message, size: int) -> None:
        """Write a line about a message that is about to be sent with the content of `sent`, in so
        many bytes.
        """
        metadata = message.metadata
        unasked = Asked(metadata.message_type, 0, "", str(metadata.run_id))
        self._write(self.asked.pop(metadata.reply_to_message_id, unasked), size, **_described(sent))

    def record_stream(self, event: str, count: int) -> None:
        """Write a line about a connection of the side channel: its bytes, and the step that the
        site was asked for.
        """
        steps = [each for each in list(self.asked.values()) if "layerwise" in each.kind]
        self._step = [self._step, *steps][-1]
        self._write(replace(self._step, kind=f"side channel {event}"), count)

    def _write(self, asked: Asked, size: int, **more: Any) -> None:
        if self._path is None:
            return
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": asked.run,
            "round": asked.server_round,
            "message": asked.kind,
            "app": asked.app,
            "bytes": size,
            **more,
        }
        line = json.dumps(row, default=str).encode() + b"\n"
        # what a full disk or a failure of power has cut off must not take the next line with it
        with self._lock, self._path.open("ab+", buffering=0) as file:
            end = file.seek(0, SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                line = b"\n" + line
            if file.write(line) < len(line):
                file.truncate(end)
                raise OSError(ENOSPC, strerror(ENOSPC), str(self._path))


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; the last one may be in the making, and for one that is cut off, or
    is no row, stands `BROKEN`.
    """
    with path.open(errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                row = None
                with suppress(ValueError):
                    row = json.loads(line)
                if isinstance(row, dict) and row.keys() >= BROKEN.keys():
                    yield row
                else:
                    yield BROKEN


def _described(sent: Message) -> dict[str, Any]:
    if sent.has_error():
        return {"error": sent.error.reason}
    content: RecordDict = sent.content
    records: dict[str, Any] = {**content.metric_records, **content.config_records}
    numbers = {name: dict(record.items()) for name, record in records.items()}
    arrays = {}
    for group, record in content.array_records.items():
        names = _packed_names(numbers.get(_PACKED, {}).get(group))
        if names:
            del numbers[_PACKED][group]
        names = names or list(record)
        size = sum(len(array.data) for array in record.values())
        arrays[group] = {"count": len(names), "bytes": size, "names": names}
    return {"arrays": arrays, **numbers}


def _packed_names(layout: object) -> list[str]:
    """Return the names in a layout of packed arrays; none if it is something else, or has more in
    it.
    """
    try:
        rows = json.loads(str(layout))
        names = [name for name, dtype, shape in rows if _is_entry(name, dtype, shape)]
    except (TypeError, ValueError, RecursionError):
        return []
    return names if len(names) == len(rows) else []


def _is_entry(name: object, dtype: object, shape: object) -> bool:
    if isinstance(shape, list):
        lengths = shape
    else:
        lengths = [None]
    return (
        isinstance(name, str)
        and isinstance(dtype, str)
        and len(dtype) < 5
        and all(type(n) is int for n in lengths)
    )


def rows_of(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line about each kind of message in each round of each run, with its number, bytes,
    metrics and app.
    """
    rounds: dict[tuple[str, int, str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["message"].startswith("side channel"):
            kind = "side channel"
        else:
            kind = line["message"]
        rounds.setdefault((line["run"], line["round"], kind, line["app"]), []).append(line)
    return [_spoken(*key, rows) for key, rows in rounds.items()]


def _spoken(run: str, number: int, kind: str, app: str, rows: Sequence[Mapping[str, Any]]) -> str:
    arrays = sum(group["count"] for row in rows for group in row.get("arrays", {}).values())
    names = sorted({name for row in rows for name in row.get("metrics", {})})
    errors = [str(row["error"]) for row in rows if row.get("error")]
    parts = [
        f"run {run}",
        f"round {number}",
        kind,
        f"messages {len(rows)}",
        f"arrays {arrays}",
        f"bytes {sum(row['bytes'] for row in rows)}",
        f"metrics {', '.join(names) or 'none'}",
        *(f"error {error.splitlines()[0]}" for error in errors[:1]),
        f"app {app or 'unknown'}",
    ]
    return "  ".join(parts)
