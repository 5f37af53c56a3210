"""The results of a benchmark: rows, and the machine that they were measured on."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.cases import Case
from benchmarks.driver import Measured
from fedbn_flwr import __version__
from fedbn_flwr.device import accelerator_name, count_cores
from fedbn_flwr.experiments.output.run_folder import VERSIONED, as_json, installed_versions

Row = dict[str, Any]

BARE = "bare"


def rows_of(case: Case, results: Sequence[Measured]) -> list[Row]:
    """Return a row for each engine, the fastest of several numbers of threads.

    The bare loop is the yardstick.
    """
    engines = [
        [each for each in results if each.engine == engine]
        for engine in dict.fromkeys(_engines(results))
    ]
    best = [_fastest(each) for each in engines]
    yardstick = next((each for each in best if each.engine == BARE and not each.error), None)
    rows = [_row(case, each, yardstick) for each in best]
    for row, runs in zip(rows, engines, strict=True):
        if len(runs) > 1:
            row["seconds-by-threads"] = {
                str(each.threads): each.seconds for each in runs if not each.error
            }
    return rows


def line_of(row: Row) -> str:
    """Return a row of a table of Markdown: the case, the seconds of a round, the ratio to the bare
    loop, memory.
    """
    if row["seconds-per-round"] is None:
        cells = ["failed", *[""] * 4]
    else:
        ratio = (
            ""
            if row["ratio"] is None
            else f"{row['ratio']:.2f} ({' to '.join(map('{:.2f}'.format, row['ratio-range']))})"
        )
        sizes = [
            f"{row[key]:,.0f}" if key in row else ""
            for key in ("peak-memory-mb", "peak-gpu-memory-mb")
        ]
        cells = [f"{row['seconds-per-round']:.4f}", ratio, *sizes, str(row.get("fitting", ""))]
    images, engine = f"{row['size']} x {row['size']}", row["engine"]
    if (row.get("workers") or 1) > 1:
        engine += f", {row['workers']} processes"
    case = (
        row["model"],
        images,
        row["clients"],
        row["method"],
        row["local-steps"],
        row["arithmetic"],
        engine,
    )
    return f"| {' | '.join(map(str, (*case, *cells)))} |"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of Markdown."""
    titles = (
        "model",
        "images",
        "clients",
        "method",
        "E",
        "arithmetic",
        "engine",
        "s a round",
        "ratio",
        "MiB",
        "GPU MiB",
        "largest stack",
    )
    return (
        "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *map(line_of, rows)])
        + "\n"
    )


def _engines(results: Sequence[Measured]) -> list[str]:
    """The yardstick first."""
    return sorted((each.engine for each in results), key=lambda engine: engine != BARE)


def _fastest(runs: Sequence[Measured]) -> Measured:
    """Return one engine's fastest measurement; a failed one if all failed."""
    return min(
        (each for each in runs if not each.error), key=lambda each: each.seconds, default=runs[0]
    )


def write(path: Path, content: object) -> None:
    """Write JSON; an interrupted run leaves what was complete."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(as_json(content, indent=2) + "\n")
    partial.replace(path)


def machine() -> dict[str, Any]:
    """Hardware, its load, and versions."""
    gpu = accelerator_name() or None
    return {
        "processor": _processor(),
        "cores": count_cores(),
        "memory-gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu,
        "system": platform.platform(),
        "load-at-start": os.getloadavg()[0],
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "versions": {
            "fedbn-flwr": __version__,
            "python": platform.python_version(),
            **installed_versions((*VERSIONED, "pfl")),
        },
    }


def _row(case: Case, measured: Measured, yardstick: Measured | None) -> Row:
    row = {
        "engine": measured.engine,
        "model": case.model,
        "size": case.size,
        "method": case.method,
        "clients": case.clients,
        "local-steps": case.local_steps,
        "batch-size": case.batch_size,
        "arithmetic": case.arithmetic,
        **dict.fromkeys(("seconds-per-round", "spread", "ratio", "ratio-range", "peak-memory-mb")),
        "dataset": case.dataset,
        "threads": measured.threads,
        "workers": None,
    }
    return (
        {**row, "error": measured.error}
        if measured.error
        else {**row, **_numbers(measured, yardstick)}
    )


def _numbers(measured: Measured, yardstick: Measured | None) -> Row:
    every = [seconds for turn in measured.turns for seconds in turn]
    numbers = {
        "seconds-per-round": measured.seconds,
        "spread": _interquartile_range(every),
        "first-round-seconds": measured.first,
        "repetitions": len(measured.turns),
        "rounds": len(every),
        **measured.notes,
    }
    if yardstick is None:
        return numbers
    # in turn: what slows a while of the run down is in both
    ratios = [own / bare for own, bare in zip(measured.medians, yardstick.medians, strict=False)]
    return {**numbers, "ratio": median(ratios), "ratio-range": [min(ratios), max(ratios)]}


def _interquartile_range(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
