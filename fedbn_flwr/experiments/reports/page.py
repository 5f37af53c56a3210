"""The files of a report: a page that needs nothing from elsewhere, and what a paper takes up."""

import argparse
import csv
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from io import BytesIO, StringIO
from pathlib import Path
from textwrap import fill
from typing import Any

from fedbn_flwr import __version__
from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.experiments.output.plots import styled
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.recipes.table import findings, values_of
from fedbn_flwr.experiments.reports.bars import bars
from fedbn_flwr.experiments.reports.curves import SETTINGS, curves
from fedbn_flwr.experiments.reports.sources import Source, counts, read_sources
from fedbn_flwr.experiments.reports.tables import Cell, Table, cost_table, curve_table, result_table, run_table
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state.record_files import write_bytes

#: what LaTeX reads in another way than as the letter
ESCAPES = {letter: f"\\{letter}" for letter in "#$%&_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",
    "*": "{*}",
    "±": r"$\pm$",
}
#: rows of a table on a page
ROWS = 55
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


def to_csv(table: Table) -> str:
    """Return a table as CSV: numbers with all their digits, and deviations in columns of their own."""
    columns: list[list[object]] = []
    for name in table.headings:
        cells = [row[name] for row in table.rows]
        is_text = [cell.number is None or cell.text == "baseline" for cell in cells]
        columns.append([name, *(cell.text if text else cell.number for cell, text in zip(cells, is_text, strict=True))])
        if any(cell.spread is not None for cell in cells):
            columns.append([f"{name} ±", *(cell.spread for cell in cells)])
    file = StringIO()
    csv.writer(file, lineterminator="\n").writerows(zip(*columns, strict=True))
    return file.getvalue()


def latex(template: str, **values: object) -> str:
    """Fill in a template of LaTeX, whose marks are `<%` and `<<`."""
    marks = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
    return _fill(template, values, **marks, variable_end_string=">>", keep_trailing_newline=True)


def html(template: str, **values: object) -> str:
    """Fill in a template of HTML, whose values are text and no markup."""
    return _fill(template, values, autoescape=True, lstrip_blocks=True)


def _fill(template: str, values: Mapping[str, object], **options: Any) -> str:
    # a node's process imports this module, and never needs it
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader(__package__, "template"), trim_blocks=True, **options)
    environment.filters |= {"escape": escape, "cell": _latex_cell} if "block_start_string" in options else {}
    return environment.get_template(template).render(values)


def _latex_cell(cell: Cell) -> str:
    text = escape(cell.text)
    return f"${text[0]}${text[1:]}" if cell.number is not None and text[:1] in ("-", "+") else text


def escape(text: str) -> str:
    """Return a text as LaTeX prints it."""
    return "".join(ESCAPES.get(letter, letter) for letter in text)


def _plain(table: Table, title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return rows of a table as letters of equal width."""
    cells = [table.headings, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        triples = zip(table.headings, row, widths, strict=True)
        padded = [text.rjust(width) if name in table.numeric else text.ljust(width) for name, text, width in triples]
        lines.append("  ".join(padded))
    rule = "─" * len(lines[0])
    caption = fill(table.caption, max(len(rule), 60))
    return "\n".join([f"{title}: {table.name}", "", caption, rule, lines[0], rule, *lines[1:], rule, table.footer])


class Part:
    """One source as it stands in the report; `template/page.html` shows its attributes."""

    def __init__(self, source: Source, folder: Path, prefix: str) -> None:
        """With `prefix` the names of the source's files begin."""
        values = values_of(source.results, source.record.rounds if source.record else 1)
        self.source, self.folder, self.prefix = source, folder, prefix
        self.results, self.costs, self.runs = result_table(source, values), cost_table(source), run_table(source)
        self.tables = [table for table in (self.results, self.costs) if table.rows]
        # they are not drawn yet
        self.pictures = [*bars(source, values), *curves(source)]
        self.findings = findings(source.results, values)
        settings = len({run.setting for run in source.runs if run.rows})
        self.settings_left_out = settings - SETTINGS if settings > SETTINGS else 0

    def draw(self, kind: str) -> dict[str, bytes]:
        """Write all pictures as files of a kind; return their contents by name."""
        files = {f"{self.prefix}{picture.name}.{kind}": picture.file(kind) for picture in self.pictures}
        for name, content in files.items():
            write_bytes(self.folder / name, content)
        return files

    def facts(self) -> list[tuple[str, str]]:
        """Return what ran and how, each fact with its name; different values of the runs side by side."""
        runs, record = self.source.runs, self.source.record
        facts: dict[tuple[str, str], None] = {}
        for run in runs:
            versions = ", ".join(f"{name} {version}" for name, version in run.config.get("versions", {}).items())
            machine = [f"{run.config.get(key) or ''}{' cores' * (key == 'cores')}" for key in MACHINE]
            facts |= {("command", record.command if record else str(run.config.get("command", ""))): None}
            facts |= {("versions", versions): None, ("machine", ", ".join(filter(None, machine))): None}
        return sorted((fact for fact in facts if fact[1]), key=lambda fact: ORDER.index(fact[0]))

    def options(self) -> dict[str, str]:
        """Return the options that all begun runs share."""
        begun = [run.options for run in self.source.runs if run.options]
        first = begun[0] if begun else {}
        return {key: str(value) for key, value in first.items() if all(other.get(key) == value for other in begun)}


def _write_html(parts: Sequence[Part], folder: Path) -> str:
    images = [[b64encode(content).decode() for content in part.draw("png").values()] for part in parts]
    page = html(
        "page.html",
        parts=list(zip(parts, images, strict=True)),
        title=parts[0].source.title if len(parts) == 1 else f"{len(parts)} results",
        summary=counts([run for part in parts for run in part.source.runs]),
        version=__version__,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )
    write_bytes(folder / PAGE, page.encode())
    return PAGE


def _write_csv(parts: Sequence[Part], folder: Path) -> str:
    for part in parts:
        for table in (*part.tables, part.runs, curve_table(part.source)):
            write_bytes(folder / f"{part.prefix}{table.name}.csv", to_csv(table).encode())
    return f"{parts[0].prefix}{parts[0].tables[0].name}.csv"


def _write_latex(parts: Sequence[Part], folder: Path) -> str:
    for part in parts:
        part.draw("pdf")
        for table in part.tables:
            write_bytes(folder / f"{part.prefix}{table.name}.tex", latex("table.tex", table=table).encode())
    write_bytes(folder / "example.tex", latex("example.tex", parts=parts).encode())
    return "example.tex"


def _write_pdf(parts: Sequence[Part], folder: Path) -> str:
    """Write a document with the tables and the pictures of each part, each on a page of its size."""
    file = BytesIO()
    with styled() as figure_class:
        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(file, metadata={"CreationDate": None}) as document:
            for part in parts:
                for table in part.tables:
                    rows = table.texts()
                    for start in range(0, len(rows), ROWS):
                        text = _plain(table, part.source.title, rows[start : start + ROWS])
                        page = figure_class()
                        page.text(0, 1, text, va="top", fontsize=8, family="monospace", parse_math=False)
                        document.savefig(page, bbox_inches="tight", pad_inches=0.4)
                for picture in part.pictures:
                    document.savefig(picture.draw(figure_class, fill(picture.caption, 70)), pad_inches=0.2)
    write_bytes(folder / "report.pdf", file.getvalue())
    return "report.pdf"


def _write_svg(parts: Sequence[Part], _: Path) -> str:
    names = [name for part in parts for name in part.draw("svg")]
    return names[0] if names else ""


#: format -> what writes it, and returns the name of its main file
WRITERS: dict[str, Callable[[Sequence[Part], Path], str]] = {
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
    text = f"comma-separated: {', '.join(WRITERS)} [html]"
    parser.add_argument("--format", metavar="FORMATS", default="html", help=text)


def report(options: Mapping[str, Any]) -> None:
    """Write the page, and the files of other formats."""
    folders = [Path(name).expanduser() for name in options["runs"]]
    out = options.get("out")
    folder = Path(out).expanduser() if out else folders[0] / "report" if len(folders) == 1 else Path("results/report")
    formats = list(dict.fromkeys(name.strip() for name in str(options["format"]).split(",")))
    if unknown := [name for name in formats if name not in WRITERS]:
        raise UsageError(f"unknown format {unknown[0]!r}; {did_you_mean(unknown[0], WRITERS)}")
    sources = read_sources(folders)
    make_folder(folder)
    prefixes = [f"{number}-" if len(sources) > 1 else "" for number in range(1, len(sources) + 1)]
    parts = [Part(source, folder, prefix) for source, prefix in zip(sources, prefixes, strict=True)]
    for name in formats:
        file = folder / WRITERS[name](parts, folder)
        beside = BESIDE.get(file.suffix, "")
        console.print(f"Report: {file.resolve()}{beside}", soft_wrap=True, markup=False, highlight=False)
