"""The command `fedbn-flwr report`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Any

from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.experiments.recipes.files import is_matrix
from fedbn_flwr.experiments.reports.page import WRITERS, write_report
from fedbn_flwr.experiments.reports.sources import Progress, read_sources
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError, whole_number

#: seconds between two looks at a running matrix
EVERY = 15
#: what stands beside a main file
BESIDE = {
    ".html": " (and its pictures as PNG files)",
    ".csv": " (and a file for each other table)",
    ".tex": " (tables with booktabs, pictures as PDF files)",
    ".svg": " (and a file for each other picture)",
}


def add_report_command(commands: Any, command: Any) -> None:
    """Add the command to the parser; `command` makes one."""
    parser: argparse.ArgumentParser = command(commands, "report", "write a page with tables and pictures of results")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="folders of `run`, `compare` or `reproduce`")
    parser.add_argument("--out", metavar="DIR", help="where the page goes [RUNS/report, or results/report for several]")
    text = f"comma-separated: {', '.join(WRITERS)} [html]"
    parser.add_argument("--format", metavar="FORMATS", default="html", help=text)
    parser.add_argument("--watch", action="store_true", help="write it again while a matrix runs, until it has ended")
    parser.add_argument("--every", metavar="SECONDS", help=f"seconds between two looks of --watch [{EVERY}]")


def report(options: Mapping[str, Any]) -> None:
    """Write the page once, or until a matrix has ended."""
    folders = [Path(name).expanduser() for name in options["runs"]]
    out = options.get("out")
    folder = Path(out).expanduser() if out else folders[0] / "report" if len(folders) == 1 else Path("results/report")
    every = whole_number("--every", options.get("every", EVERY))
    formats = list(dict.fromkeys(name.strip() for name in str(options["format"]).split(",")))
    if unknown := [name for name in formats if name not in WRITERS]:
        raise UsageError(f"unknown format {unknown[0]!r}; {did_you_mean(unknown[0], WRITERS)}")
    if options.get("watch"):
        watch(folders, folder, every, formats)
    else:
        _say(write_report(read_sources(folders), folder, formats=formats))


def _say(files: Sequence[Path]) -> None:
    for file in files:
        beside = BESIDE.get(file.suffix, "")
        console.print(f"Report: {file.resolve()}{beside}", soft_wrap=True, markup=False, highlight=False)


def watch(folders: Sequence[Path], out: Path, every: int, formats: Sequence[str]) -> None:
    """Write the page whenever a running matrix has come further; return when it has ended."""
    for folder in folders:
        if folder.is_dir() and not is_matrix(folder):
            raise UsageError(f"--watch needs the folder of `fedbn-flwr reproduce`, and {folder} is none")
    before = ""
    while True:
        sources = read_sources(folders)
        progress = [Progress.of(source) for source in sources]
        complete = all(item.complete for item in progress)
        now = "; ".join(item.text for item in progress) + str([len(run.rows) for s in sources for run in s.runs])
        if now != before:
            files = write_report(sources, out, 0 if complete else every, formats)
            for source, item in zip(sources, progress, strict=True):
                console.print(f"{source.title}: {item.text}", soft_wrap=True, markup=False)
            before = now
        if complete:
            _say(files)
            return
        sleep(every)
