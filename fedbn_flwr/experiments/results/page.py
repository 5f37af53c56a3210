"""The files of a report: a page that needs nothing from elsewhere, and what a paper takes up."""

import argparse
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

from fedbn_flwr import __version__
from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.results.bars import bars
from fedbn_flwr.experiments.results.curves import SETTINGS, curves
from fedbn_flwr.experiments.results.findings import findings
from fedbn_flwr.experiments.results.folders import Part, read_parts
from fedbn_flwr.experiments.results.pictures import styled
from fedbn_flwr.experiments.results.rows import config_of, counts, options_of_run, rounds_of
from fedbn_flwr.experiments.results.show import fill_html, fill_latex, show, text
from fedbn_flwr.experiments.results.table import COSTS, RESULTS, RUNS, curve_table, table
from fedbn_flwr.experiments.results.values import values_of
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state.record_files import write_bytes

#: rows of a table on a page
ROWS = 55
#: letters in a line of a page that is as wide as its table
ENDLESS = 1000
PAGE = "report.html"
#: keys of `config.json` that tell the machine
MACHINE = ("hardware", "cores", "system")
#: what the report tells of how runs were made
ORDER = ("command", "versions", "machine")
#: what stands beside a main file
BESIDE = {
    ".html": " (and its pictures as PNG files)",
    ".csv": " (and a file for each other table)",
    ".tex": " (tables with booktabs, pictures as PDF files)",
    ".svg": " (and a file for each other picture)",
}


class Content:
    """One part as it stands in the report; `template/page.html` shows its attributes."""

    def __init__(self, part: Part, folder: Path, prefix: str) -> None:
        """With `prefix` the names of the part's files begin."""
        rows, paper = part.rows, part.paper
        values = values_of(rows, paper.quantities, paper.rounds)
        self.part, self.folder, self.prefix = part, folder, prefix
        self.results = table(rows, RESULTS, paper)
        self.costs = table(rows, COSTS, name="costs", caption="What the runs sent, and their time")
        self.runs = table(rows, RUNS, by=("setting", "label", "seed"), name="runs", caption="All runs")
        self.tables = [shown for shown in (self.results, self.costs) if shown.lines]
        # they are not drawn yet
        self.pictures = [*bars(rows, values), *curves(rows)]
        self.findings = findings(rows, values, paper)
        settings = len({row["setting"] for row in rows if rounds_of(row)})
        self.settings_left_out = settings - SETTINGS if settings > SETTINGS else 0

    def draw(self, kind: str) -> dict[str, bytes]:
        """Write all pictures as files of a kind; return their contents by name."""
        files = {f"{self.prefix}{picture.name}.{kind}": picture.file(kind) for picture in self.pictures}
        for name, content in files.items():
            write_bytes(self.folder / name, content)
        return files

    def facts(self) -> list[tuple[str, str]]:
        """Return what ran and how, each fact with its name; different values of the runs side by side."""
        facts: dict[tuple[str, str], None] = {}
        for config in map(config_of, self.part.rows):
            versions = ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items())
            machine = [f"{config.get(key) or ''}{' cores' * (key == 'cores')}" for key in MACHINE]
            facts |= {("command", self.part.command or str(config.get("command", ""))): None}
            facts |= {("versions", versions): None, ("machine", ", ".join(filter(None, machine))): None}
        return sorted((fact for fact in facts if fact[1]), key=lambda fact: ORDER.index(fact[0]))

    def options(self) -> dict[str, str]:
        """Return the options that all begun runs share."""
        begun = list(filter(None, map(options_of_run, self.part.rows)))
        first = begun[0] if begun else {}
        return {key: str(value) for key, value in first.items() if all(other.get(key) == value for other in begun)}


def _write_html(parts: Sequence[Content], folder: Path) -> str:
    images = [[b64encode(content).decode() for content in part.draw("png").values()] for part in parts]
    page = fill_html(
        "page.html",
        parts=list(zip(parts, images, strict=True)),
        title=parts[0].part.title if len(parts) == 1 else f"{len(parts)} results",
        summary=counts([row for part in parts for row in part.part.rows]),
        version=__version__,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )
    write_bytes(folder / PAGE, page.encode())
    return PAGE


def _write_csv(parts: Sequence[Content], folder: Path) -> str:
    for part in parts:
        for shown in (*part.tables, part.runs, curve_table(part.part.rows)):
            write_bytes(folder / f"{part.prefix}{shown.name}.csv", show(shown, "csv").encode())
    return f"{parts[0].prefix}{parts[0].tables[0].name}.csv"


def _write_latex(parts: Sequence[Content], folder: Path) -> str:
    for part in parts:
        part.draw("pdf")
        for shown in part.tables:
            write_bytes(folder / f"{part.prefix}{shown.name}.tex", show(shown, "latex").encode())
    write_bytes(folder / "example.tex", fill_latex("example.tex", parts=parts).encode())
    return "example.tex"


def _write_pdf(parts: Sequence[Content], folder: Path) -> str:
    """Write a document with the tables and the pictures of each part, each on a page of its size."""
    file = BytesIO()
    with styled() as figure_class:
        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(file, metadata={"CreationDate": None}) as document:
            for part in parts:
                for shown in part.tables:
                    for start in range(0, len(shown.lines), ROWS):
                        some = replace(shown, lines=shown.lines[start : start + ROWS])
                        words = f"{part.part.title}: {shown.name}\n\n{fill(shown.caption, 100)}\n{text(some, ENDLESS)}"
                        page = figure_class()
                        page.text(0, 1, words, va="top", fontsize=8, family="monospace", parse_math=False)
                        document.savefig(page, bbox_inches="tight", pad_inches=0.4)
                for picture in part.pictures:
                    document.savefig(picture.draw(figure_class, fill(picture.caption, 70)), pad_inches=0.2)
    write_bytes(folder / "report.pdf", file.getvalue())
    return "report.pdf"


def _write_svg(parts: Sequence[Content], _: Path) -> str:
    names = [name for part in parts for name in part.draw("svg")]
    return names[0] if names else ""


#: format -> what writes it, and returns the name of its main file
WRITERS: dict[str, Callable[[Sequence[Content], Path], str]] = {
    "html": _write_html,
    "csv": _write_csv,
    "latex": _write_latex,
    "pdf": _write_pdf,
    "svg": _write_svg,
}


def add_report_command(commands: Any, command: Any) -> None:
    """Add the command to the parser; `command` makes one."""
    parser: argparse.ArgumentParser = command(commands, "report", "write a page with tables and pictures of results")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="folders of `run`, `compare` or `reproduce`")
    parser.add_argument("--out", metavar="DIR", help="where the page goes [RUNS/report, or results/report for several]")
    about = f"comma-separated: {', '.join(WRITERS)} [html]"
    parser.add_argument("--format", metavar="FORMATS", default="html", help=about)


def report(options: Mapping[str, Any]) -> None:
    """Write the page, and the files of other formats."""
    folders = [Path(name).expanduser() for name in options["runs"]]
    out = options.get("out")
    folder = Path(out).expanduser() if out else folders[0] / "report" if len(folders) == 1 else Path("results/report")
    formats = list(dict.fromkeys(name.strip() for name in str(options["format"]).split(",")))
    if unknown := [name for name in formats if name not in WRITERS]:
        raise UsageError(f"unknown format {unknown[0]!r}; {did_you_mean(unknown[0], WRITERS)}")
    read = read_parts(folders)
    make_folder(folder)
    parts = [Content(part, folder, f"{n}-" if len(read) > 1 else "") for n, part in enumerate(read, start=1)]
    for name in formats:
        file = folder / WRITERS[name](parts, folder)
        beside = BESIDE.get(file.suffix, "")
        console.print(f"Report: {file.resolve()}{beside}", soft_wrap=True, markup=False, highlight=False)
