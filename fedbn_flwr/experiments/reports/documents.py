"""The tables and pictures of a report as files for a paper: CSV, LaTeX and PDF."""

import csv
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from textwrap import fill
from typing import Any

from fedbn_flwr.experiments.output.plots import Picture, styled
from fedbn_flwr.experiments.reports.tables import Cell, Table

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


def to_pdf(parts: Sequence[tuple[str, Sequence[Table], Sequence[Picture]]]) -> bytes:
    """Return a document with the title, the tables and the pictures of each part, each on a page of its size."""
    file = BytesIO()
    with styled() as figure_class:
        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(file, metadata={"CreationDate": None}) as document:
            for title, tables, pictures in parts:
                for table in tables:
                    rows = table.texts()
                    for start in range(0, len(rows), ROWS):
                        text = _plain(table, title, rows[start : start + ROWS])
                        page = figure_class()
                        page.text(0, 1, text, va="top", fontsize=8, family="monospace", parse_math=False)
                        document.savefig(page, bbox_inches="tight", pad_inches=0.4)
                for picture in pictures:
                    document.savefig(picture.draw(figure_class, fill(picture.caption, 70)), pad_inches=0.2)
    return file.getvalue()


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
