"""The tables and pictures of a report as files for a paper: CSV, LaTeX, PDF and SVG."""

import csv
from collections.abc import Sequence
from io import BytesIO, StringIO
from textwrap import fill
from typing import Any

from fedbn_flwr.experiments.reports.style import Picture, styled
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
DOCUMENT = r"""\documentclass[a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage[margin=2cm]{geometry}
\usepackage{booktabs,graphicx}
\begin{document}
%s
\end{document}
"""
FITTED = r"\resizebox{\ifdim\width>\linewidth \linewidth\else\width\fi}{!}"
#: inches of a page, and of its margin
PAGE, MARGIN = (8.27, 11.69), 0.7
#: points of a table's letters at most, the height of a line and the width of a letter in them
POINTS, LINE, LETTER = 8.0, 1.45, 0.602
#: rows of a table on a page, letters of its caption in a line, and pictures on a page
ROWS, CAPTION, PICTURES = 55, 110, 2


def to_csv(table: Table) -> str:
    """Return a table as CSV: numbers with all their digits, and deviations in columns of their own."""
    file, spread = StringIO(), {i for row in table.rows for i, cell in enumerate(row) if cell.spread is not None}
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [text for i, name in enumerate(table.headings) for text in (name, f"{name} ±")[: 1 + (i in spread)]]
    )
    for row in table.rows:
        plain = [cell.text if cell.number is None or cell.text == "baseline" else cell.number for cell in row]
        behind = ["" if cell.spread is None else cell.spread for cell in row]
        writer.writerow(
            [x for i, pair in enumerate(zip(plain, behind, strict=True)) for x in pair[: 1 + (i in spread)]]
        )
    return file.getvalue()


def to_latex(table: Table) -> str:
    """Return a table for `\\input`; it needs the packages booktabs and graphicx."""
    columns = "".join("r" if index in table.numeric else "l" for index in range(len(table.headings)))
    rows = [" & ".join(_latex_cell(cell) for cell in row) + r" \\" for row in table.rows]
    heading = " & ".join(escape(text) for text in table.headings) + r" \\"
    body = [r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
    tabular = "\n".join([rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])
    # a table that is wider than the text is made smaller
    fitted = f"{FITTED}{{%\n{tabular}}}"
    footer = [rf"\par\smallskip{{\footnotesize {escape(table.footer)}}}"] if table.footer else []
    start = [r"\begin{table}[htbp]", r"\centering", rf"\caption{{{escape(table.caption)}}}"]
    return "\n".join([*start, fitted, *footer, r"\end{table}", ""])


def _latex_cell(cell: Cell) -> str:
    text = escape(cell.text)
    return f"${text[0]}${text[1:]}" if cell.number is not None and text[:1] in ("-", "+") else text


def latex_figure(picture: Picture, file: str) -> str:
    """Return the LaTeX of a picture that is in a file."""
    graphic = rf"\includegraphics[width=0.7\linewidth]{{{file}}}"
    return "\n".join(
        [
            r"\begin{figure}[htbp]",
            r"\centering",
            graphic,
            rf"\caption{{{escape(picture.caption)}}}",
            r"\end{figure}",
            "",
        ]
    )


def escape(text: str) -> str:
    """Return a text as LaTeX prints it."""
    return "".join(ESCAPES.get(letter, letter) for letter in text)


def to_pdf(parts: Sequence[tuple[str, Sequence[Table], Sequence[Picture]]]) -> bytes:
    """Return a document with the title, the tables and the pictures of each part."""
    file = BytesIO()
    with styled() as figure_class:
        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(file, metadata={"CreationDate": None}) as document:
            for title, tables, pictures in parts:
                for table in tables:
                    for start in range(0, len(table.rows), ROWS):
                        page = figure_class(figsize=PAGE)
                        _draw_table(page, title, table, start)
                        document.savefig(page)
                for start in range(0, len(pictures), PICTURES):
                    page = figure_class(figsize=PAGE, layout="constrained")
                    page.get_layout_engine().set(rect=(0.08, 0.05, 0.84, 0.9))
                    halves = page.subfigures(PICTURES, 1, hspace=0.05)
                    for half, picture in zip(halves, pictures[start : start + PICTURES], strict=False):
                        half.suptitle(fill(picture.caption, 70), fontsize=10)
                        picture.draw(half)
                    document.savefig(page)
    return file.getvalue()


def _draw_table(page: Any, title: str, table: Table, start: int) -> None:
    """Draw some rows of a table with three rules, as small as its width needs."""
    texts = [table.headings, *([cell.text for cell in row] for row in table.rows[start : start + ROWS])]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    gaps = 2 * (len(widths) - 1)
    size = min(POINTS, (PAGE[0] - 2 * MARGIN) * 72 / ((sum(widths) + gaps) * LETTER))
    right, line = MARGIN + (sum(widths) + gaps) * LETTER * size / 72, LINE * size / 72

    def write(text: str, height: float, **style: Any) -> None:
        page.text(MARGIN / PAGE[0], height / PAGE[1], text, va="top", **style)

    caption = fill(table.caption, CAPTION)
    write(f"{title}: {table.name}", PAGE[1] - MARGIN, fontsize=11, fontweight="bold")
    write(caption, PAGE[1] - MARGIN - 0.3, fontsize=8)
    top = PAGE[1] - MARGIN - 0.55 - 0.15 * caption.count("\n")
    for index, row in enumerate(texts):
        pairs = enumerate(zip(row, widths, strict=True))
        padded = [text.rjust(width) if i in table.numeric else text.ljust(width) for i, (text, width) in pairs]
        write("  ".join(padded), top - (index + 0.2) * line, fontsize=size, family="monospace")
    for index, weight in ((0, 1.0), (1, 0.6), (len(texts), 1.0)):
        height = (top - index * line) / PAGE[1]
        page.add_artist(_rule((MARGIN / PAGE[0], right / PAGE[0]), height, weight))
    write(table.footer, top - len(texts) * line - 0.1, fontsize=8)


def _rule(ends: tuple[float, float], height: float, weight: float) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(ends, (height, height), color="black", linewidth=weight)
