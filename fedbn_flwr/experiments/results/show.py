"""The forms of a table: in a terminal, as HTML, as CSV and for LaTeX."""

from dataclasses import replace
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from fedbn_flwr.experiments.output.console import console, new_table, say
from fedbn_flwr.experiments.recipes.paper import Paper
from fedbn_flwr.experiments.recipes.statements import statements
from fedbn_flwr.experiments.results.rows import Frame, Part, pd, score_of, typical
from fedbn_flwr.experiments.results.tables import (
    WEAK,
    Table,
    by_domain,
    comparison,
    reproduced,
    unseen,
)
from fedbn_flwr.experiments.results.values import heading_of

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
#: columns that a terminal may break where there is no mark to break at
FOLDED = ("setting", "method", "state")


def terminal(shown: Table) -> None:
    """Print a table with its caption.

    One wider than the terminal breaks headings, options and deviations.
    """
    rich = new_table(shown.caption)
    texts = shown.texts
    for name in texts:
        justify: Any = "right" if name in shown.numeric else "left"
        rich.add_column(name, justify=justify, overflow="fold", no_wrap=name not in FOLDED)
    if "setting" in texts:  # a setting is named once
        settings = texts["setting"]
        texts = texts.assign(setting=settings.where(settings != settings.shift(), ""))
    for line in texts.itertuples(index=False):
        rich.add_row(*map(Text, line))
    wide = console.options.update_width(1000)
    if console.measure(rich, options=wide).maximum > console.width:
        _break(rich)
        least = console.measure(rich, options=wide).minimum
        if least > console.width:
            rich.width = least  # rather wider than the terminal than with names in two
    console.print(rich, crop=False)
    say(f"  {note}" for note in shown.footer)


def _break(rich: RichTable) -> None:
    for column in rich.columns:
        column.header = str(column.header).replace(" ", "\n")
        column.no_wrap = column.no_wrap and not str(column.header).startswith("vs")
        for cell in column.cells:
            if isinstance(cell, Text):
                cell.plain = str(cell).replace(":", "\n:").replace(" ±", "\n±")


def to_csv(shown: Table) -> str:
    """Return a table as CSV: numbers with all their digits, and deviations in columns of their
    own.
    """
    columns = {}
    for heading in shown.texts:
        own = shown.frame[heading]
        name = _harmless(heading)
        columns[name] = own["text"].map(_harmless)
        if heading in shown.numeric:
            there = own["number"].notna()
            columns[name] = columns[name].astype(object).mask(there, own["number"])
            if own["spread"].notna().any():
                columns[f"{name} ±"] = own["spread"]
    return str(pd.DataFrame(columns).to_csv(index=False))


def _harmless(text: Any) -> Any:
    """Return a text that no program for tables takes for a formula."""
    if str(text).startswith(("=", "+", "-", "@")):
        return f"'{text}"
    return text


def to_latex(shown: Table) -> str:
    """Return a table for LaTeX, with the rules of booktabs."""
    texts = shown.texts.map(latex).rename(columns=latex)
    form = ""
    for heading, name in zip(shown.texts, texts, strict=True):
        if heading in shown.numeric:
            form += "r"
            texts[name] = texts[name].str.replace(r"^[-+]", lambda sign: f"${sign[0]}$", regex=True)
        else:
            form += "l"
    notes = ""
    if shown.footer:
        notes = f"\\par\\smallskip{{\\footnotesize {latex(' '.join(shown.footer))}}}\n"
    tabular = texts.to_latex(index=False, escape=False, column_format=form)
    caption = f"\\caption{{{latex(shown.caption)}}}\n"
    return f"\\begin{{table}}[htbp]\n\\centering\n{caption}{tabular}{notes}\\end{{table}}\n"


def latex(words: str) -> str:
    """Return a text as LaTeX prints it."""
    return "".join(ESCAPES.get(letter, letter) for letter in words)


def render(template: str, **values: object) -> str:
    """Fill in a template of HTML, whose values are text and no markup."""
    # a node's process imports this module, and never needs it
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader(__package__, "template")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, autoescape=True)
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(values)


def _breakable(words: str) -> Any:
    """Return a text as HTML that may break before the options and layers of a method, and after a
    comma.
    """
    import markupsafe

    escaped = str(markupsafe.escape(words))
    return markupsafe.Markup(
        escaped.replace(":", "<wbr>:").replace("+", "<wbr>+").replace(",", ",<wbr>")
    )


def show_comparison(runs: Frame) -> None:
    """Print a line for each method, accuracies by domain where there are domains, and why a method
    failed.
    """
    ended = runs[runs["state"] == "finished"]
    if len(ended):
        first = typical(ended)
        title = (
            f"{first['dataset']}, {first['model']}, {first['partition']}, "
            f"{first['rounds']:.0f} rounds"
        )
        if "unseen" in ended:
            about = (
                "the domain that nobody trained with, ± half the 95 % interval; adapted to "
                "its training data"
            )
            terminal(unseen(runs, f"{title}: {about}"))
        else:
            compared = comparison(runs, title)
            hints = [
                f"{line} `--seeds 3` gives intervals." if line == WEAK else line
                for line in compared.footer
            ]
            terminal(replace(compared, footer=hints))
            heading = heading_of(f"{score_of(runs)}-by-domain")
            about = f"{heading} (personal models: on their nodes' domain)"
            domains = by_domain(runs, about)
            if len(domains.frame):
                terminal(domains)
    failed = runs[runs["error"] != ""].itertuples()
    say((f"{run.label}, seed {run.seed}: {run.error}" for run in failed), style="yellow")


def show_part(part: Part) -> None:
    """Print the table of runs; of a study with a paper beside its numbers, with what holds of the
    paper, and notes.
    """
    paper = part.paper
    if paper == Paper():
        show_comparison(part.runs)
        return
    place = f" ({paper.place})" if paper.place else ""
    terminal(reproduced(part.runs, paper, f"{part.title}: {paper.about}{place}"))
    found = statements(part.runs, paper)
    say(
        [
            *(line for item in found for line in item.lines()),
            *(f"Note: {note}" for note in paper.notes),
        ]
    )
