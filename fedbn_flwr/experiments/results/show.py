"""The forms of a table: in a terminal, as HTML, as CSV and for LaTeX. A new one is a line of `FORMS`."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from fedbn_flwr.experiments.output.console import console, new_table
from fedbn_flwr.experiments.results.findings import findings
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.results.rows import Row, finished, typical
from fedbn_flwr.experiments.results.table import (
    COMPARISON,
    DOMAINS,
    REPRODUCED,
    UNSEEN,
    WEAK,
    Cell,
    Table,
    cautions,
    count,
    table,
    unseen_rows,
)
from fedbn_flwr.experiments.results.values import QUANTITIES, heading_of, is_share, values_of

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
#: the marks of LaTeX's templates
LATEX = {
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "<<",
    "variable_end_string": ">>",
    "keep_trailing_newline": True,
}
#: columns that a terminal may break where there is no mark to break at
FOLDED = ("setting", "method", "state")


def show(shown: Table, form: str) -> str:
    """Return a table in one of `FORMS`."""
    return FORMS[form](shown)


def terminal(shown: Table) -> None:
    """Print a table with its caption; one wider than the terminal breaks headings, options and deviations."""
    rich = new_table(escape(shown.caption))
    for name in shown.headings:
        justify: Any = "right" if name in shown.numeric else "left"
        rich.add_column(name, justify=justify, overflow="fold", no_wrap=name not in FOLDED)
    before = ""
    for cells in shown.cells():
        line = [cell.text for cell in cells]
        if shown.headings[0] == "setting":  # a setting is named once
            before, line[0] = line[0], line[0] if line[0] != before else ""
        rich.add_row(*map(Text, line))
    if console.measure(rich, options=console.options.update_width(1000)).maximum > console.width:
        _break(rich)
    console.print(rich)
    _say(f"  {note}" for note in shown.footer)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _break(rich: RichTable) -> None:
    for column in rich.columns:
        column.header = str(column.header).replace(" ", "\n")
        column.no_wrap = column.no_wrap and not str(column.header).startswith("vs")
        for cell in column.cells:
            if isinstance(cell, Text):
                cell.plain = str(cell).replace(":", "\n:").replace(" ±", "\n±")


def to_csv(shown: Table) -> str:
    """Return a table as CSV: numbers with all their digits, and deviations in columns of their own."""
    columns: list[list[object]] = []
    for name in shown.headings:
        cells = shown.column(name)
        is_text = [cell.number is None or cell.text == "baseline" for cell in cells]
        columns.append([name, *(cell.text if text else cell.number for cell, text in zip(cells, is_text, strict=True))])
        if any(cell.spread is not None for cell in cells):
            columns.append([f"{name} ±", *(cell.spread for cell in cells)])
    file = StringIO()
    csv.writer(file, lineterminator="\n").writerows(zip(*columns, strict=True))
    return file.getvalue()


def fill(template: str, **values: object) -> str:
    """Fill in a template: of HTML, whose values are text and no markup, or of LaTeX, with the marks `<%` and `<<`."""
    # a node's process imports this module, and never needs it
    from jinja2 import Environment, PackageLoader

    options: dict[str, Any] = LATEX if template.endswith(".tex") else {"autoescape": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader(__package__, "template"), trim_blocks=True, **options)
    environment.filters |= {"latex": _latex, "cell": _latex_cell, "breakable": _breakable}
    return environment.get_template(template).render(values)


FORMS: dict[str, Callable[[Table], str]] = {
    "html": lambda shown: fill("table.html", table=shown),
    "csv": to_csv,
    "latex": lambda shown: fill("table.tex", table=shown),
}


def _latex_cell(cell: Cell) -> str:
    shown = _latex(cell.text)
    return f"${shown[0]}${shown[1:]}" if cell.number is not None and shown[:1] in ("-", "+") else shown


def _latex(words: str) -> str:
    """Return a text as LaTeX prints it."""
    return "".join(ESCAPES.get(letter, letter) for letter in words)


def _breakable(words: str) -> Any:
    """Return a text as HTML that may break before the options and layers of a method, and after a comma."""
    import markupsafe

    return markupsafe.Markup(
        str(markupsafe.escape(words)).replace(":", "<wbr>:").replace("+", "<wbr>+").replace(",", ",<wbr>")
    )


def show_run(row: Row) -> None:
    """Print the result of one run."""
    lines = []
    for key, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_percent = key in QUANTITIES and is_share(key) and isinstance(value, float)
            digits = 2 if is_percent else 4 if isinstance(value, float) else 0
            name, number = (heading_of(key), 100 * value) if is_percent else (key, value)
            lines.append({"result": Cell(name), "value": count(number, digits)})
    title = f"{row['method']} on {row['dataset']}, {row['model']}, {row['partition']}"
    terminal(Table("run", title, lines, cautions([row])))
    console.print(f"Results: {Path(row['folder']).resolve()}", soft_wrap=True)


def show_comparison(rows: Sequence[Row]) -> None:
    """Print a line for each method, accuracies by domain where there are domains, and why a method failed."""
    if done := finished(rows):
        first = typical(done)
        title = f"{first['dataset']}, {first['model']}, {first['partition']}, {first['rounds']:.0f} rounds"
        if "unseen" in first:
            about = (
                f"{title}: the domain that nobody trained with, ± half the 95 % interval; adapted to its training data"
            )
            terminal(table(unseen_rows(rows), UNSEEN, digits=1, caption=about))
        else:
            compared = table(rows, COMPARISON, digits=1, caption=title)
            hints = [f"{line} `--seeds 3` gives intervals." if line == WEAK else line for line in compared.footer]
            terminal(replace(compared, footer=hints))
        by_domain = "accuracy by domain, % (personal models: on their nodes' domain)"
        if (domains := table(rows, DOMAINS, digits=1, caption=by_domain)).lines and "unseen" not in first:
            terminal(domains)
    for row in rows:
        if row["error"]:
            console.print(f"{row['label']}, seed {row['seed']}: {row['error']}", style="yellow", soft_wrap=True)


def show_study(title: str, rows: Sequence[Row], paper: Paper) -> None:
    """Print the table of a study beside the paper's numbers, what holds of the paper, and notes."""
    place = f" ({paper.place})" if paper.place else ""
    found = findings(rows, values_of(rows, paper.quantities, paper.rounds), paper)
    terminal(table(rows, REPRODUCED, paper, caption=f"{title}: {paper.about}{place}"))
    _say([*(line for item in found for line in item.lines()), *(f"Note: {note}" for note in paper.notes)])
