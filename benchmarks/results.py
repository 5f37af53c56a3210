"""What a benchmark leaves behind: rows, and the machine that they were measured on."""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from experiments.results import VERSIONED, as_json
from fedbn_flwr import __version__

from .cases import Case
from .contestants import Measured

Row = dict[str, Any]

BARE = "bare"


def rows_of(case: Case, results: Sequence[Measured], peak_tflops: float = 0.0) -> list[Row]:
    """A row an engine; of the bare loops, which differ in their threads, the fastest, which is the yardstick."""
    loops = [each for each in results if each.engine == BARE and not each.error]
    yardstick = min(loops, key=lambda each: each.seconds, default=None)
    others = [each for each in results if each.engine != BARE or not loops]
    rows = [_row(case, each, yardstick) for each in ([yardstick, *others] if yardstick else others)]
    if yardstick:
        rows[0]["seconds-by-threads"] = {str(each.threads): each.seconds for each in loops}
        flops = yardstick.notes.get("flops-per-round", 0)
        for row in rows:
            if peak_tflops and row["seconds-per-round"]:
                row["share-of-peak"] = flops / row["seconds-per-round"] / (peak_tflops * 1e12)
    return rows


def write(path: Path, content: object) -> None:
    """Write JSON; an interrupted run leaves what was complete."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(as_json(content, indent=2) + "\n")
    partial.replace(path)


def machine() -> dict[str, Any]:
    """Hardware, its load, and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory-gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu,
        "system": platform.platform(),
        "load-at-start": os.getloadavg()[0],
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "versions": {"fedbn-flwr": __version__, "python": platform.python_version(), **_versions()},
    }


def _row(case: Case, measured: Measured, yardstick: Measured | None) -> Row:
    row = {
        "engine": measured.engine,
        "model": case.model,
        "method": case.method,
        "clients": case.clients,
        "local-steps": case.local_steps,
        "batch-size": case.batch_size,
        **dict.fromkeys(("seconds-per-round", "spread", "ratio", "ratio-range", "peak-memory-mb")),
        "dataset": case.dataset,
        "threads": measured.threads,
        **dict.fromkeys(("workers", "how", "compile-seconds")),
    }
    return {**row, "error": measured.error} if measured.error else {**row, **_numbers(measured, yardstick)}


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


def _versions() -> dict[str, str]:
    return dict(_installed((*VERSIONED, "pfl")))


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
