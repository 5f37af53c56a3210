"""A run is a row: where it stands in its study, its state, its folder, and every key of its `summary.json`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.output.run_folder import CONFIG, SUMMARY, read_json, read_rounds
from fedbn_flwr.plugins import extra

Row = Mapping[str, Any]
#: what a run can have come to; an unfinished one runs, or was interrupted
STATES = ("finished", "failed", "unfinished", "waiting")

#: scores on a domain that nobody trained with, after adapting to so many of its unlabeled samples
ADAPTED = ("accuracy-adapted-20", "accuracy-adapted-100", "accuracy-adapted-all")


def row_of(folder: Path, summary: Row | None = None, **place: Any) -> Row:
    """Return the row of one run: of its `summary`, by default that in its folder.

    `place` has its setting, labels, label, method and seed.
    """
    own = read_json(folder / SUMMARY) if summary is None else summary
    known = own if isinstance(own, Mapping) else {}
    error = str(known.get("failed") or known.get("error") or "")
    state = "failed" if error else "finished" if known else "unfinished" if read_rounds(folder) else "waiting"
    about = {"setting": "", "labels": {}, "label": "", "method": "", "seed": 0, **place}
    about |= {"state": state, "error": error, "folder": str(folder)}
    return {**about, **known, **about}


def config_of(row: Row) -> Mapping[str, Any]:
    """Return the content of a run's `config.json`; empty before the run began."""
    config = read_json(Path(row["folder"]) / CONFIG)
    return config if isinstance(config, dict) else {}


def options_of_run(row: Row) -> Mapping[str, Any]:
    """Return the options of a run; empty before it began."""
    options: Mapping[str, Any] = config_of(row).get("options", {})
    return options


def rounds_of(row: Row, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
    """Return what a run has written about its rounds so far."""
    return read_rounds(Path(row["folder"]), name)


def rounds_run(row: Row) -> Any:
    """Return the number of rounds of a finished run, which may have stopped before the last one of its options."""
    return row.get("stopped-after", row.get("rounds"))


def frame_of(rows: Sequence[Row]) -> Any:
    """Return rows as a `pandas.DataFrame`."""
    with extra("cli"):  # takes a second to import
        import pandas

    return pandas.DataFrame(rows)


def records(rows: Any) -> list[Row]:
    """Return the rows of a `pandas.DataFrame` as mappings, without what a run lacks; a list stays as it is."""
    if isinstance(rows, list):
        return rows
    return [
        {key: value for key, value in row.items() if value is not None and value == value}  # NaN is not itself
        for row in rows.to_dict("records")
    ]


def finished(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of runs that came to their end."""
    return [row for row in rows if row["state"] == "finished"]


def metric_of(row: Row) -> str:
    """Return the score by which a run is compared with others."""
    return str(row.get("metric") or "accuracy")


def score_of(rows: Sequence[Row]) -> str:
    """Return the score by which methods are compared."""
    return next((metric_of(row) for row in finished(rows) if "metric" in row), "accuracy")


def typical(rows: Sequence[Row]) -> Row:
    """Return a run whose partition is that of the clients: the centralized reference only if it is alone."""
    return next((row for row in rows if row.get("partition") != "union"), rows[0])


def title_of(row: Row) -> str:
    """Return data, model, partition and clients of a run as one line."""
    return f"{row['dataset']}, {row['model']}, {row['partition']}, {row['clients']:.0f} clients"


def counts(rows: Sequence[Row]) -> str:
    """Return how many runs are in each state."""
    states = Counter(row["state"] for row in rows)
    named = [f"{states[state]} {state}" for state in STATES if states[state]]
    return f"{len(rows)} run{'s' * (len(rows) != 1)}: {', '.join(named)}"


def outcome_of(row: Row) -> str:
    """Return in a few words how a run failed: `failed`, or that it diverged and when."""
    return f"diverged at round {row['diverged']:.0f}" if "diverged" in row else "failed"


def about_absent(classes: Sequence[str], partition: str, clients: int) -> str:
    """Return a sentence about classes that nobody has, though they are tested."""
    few = ", ".join(classes[:5]) + ", ..." * (len(classes) > 5)
    return f"no client has samples of {len(classes)} classes ({few}): {partition} with {clients:.0f} clients"
