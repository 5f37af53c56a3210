"""Read what versions without `study.json` wrote, as rows: matrices, comparisons, and runs, also those of `flwr run`."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedbn_flwr.experiments.output.run_folder import CONFIG, SUMMARY, read_json
from fedbn_flwr.experiments.results.rows import Row, options_of_run, row_of
from fedbn_flwr.experiments.runs import folder_name
from fedbn_flwr.plugins.options import UsageError

COMPARISON, MATRIX, CELLS = "compare.json", "matrix.json", "results.json"


def read_old(folder: Path) -> list[Row]:
    """Return the rows of the runs that are in a folder's table, or have begun; none if it holds no results."""
    if (folder / CONFIG).is_file():
        return [_row(folder)]
    try:
        listed = {place: (entry, named) for place, entry, named in _listed(folder)}
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder / COMPARISON} is not the result of a comparison: {error}") from error
    depth = "*/*" if (folder / MATRIX).is_file() else "*"
    begun = sorted(path.parent for path in folder.glob(f"{depth}-seed*/{CONFIG}"))
    return [_row(place, *listed.get(place, ())) for place in dict.fromkeys([*listed, *begun])]


def _listed(folder: Path) -> Iterator[tuple[Path, Row, Row]]:
    """Return what tables have: the folder of a run, its end, and where it stands."""
    for entry in _entries(folder / COMPARISON):
        yield _place(folder, entry), entry, {}
    for cell in _entries(folder / CELLS):
        setting = ", ".join(cell["labels"].values())
        named = {"setting": setting, "labels": cell["labels"], "label": cell["label"]}
        for entry in cell["runs"]:
            yield _place(folder / (folder_name(setting) or "runs"), entry), entry, named


def _entries(path: Path) -> list[Any]:
    entries = read_json(path) if path.exists() else []
    if not isinstance(entries, list):
        raise TypeError("no list")
    return entries


def _place(folder: Path, entry: Row) -> Path:
    return folder / f"{folder_name(entry['method'])}-seed{entry.get('seed', 0)}"


def _row(place: Path, entry: Row = MappingProxyType({}), named: Row = MappingProxyType({})) -> Row:
    end = {**entry, **(read_json(place / SUMMARY) or {})}
    known = {**options_of_run({"folder": place}), **entry}
    method = str(known.get("method") or place.name)
    return row_of(place, end, **{"label": method, "method": method, "seed": int(known.get("seed") or 0), **named})
