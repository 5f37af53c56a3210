"""The page: one HTML file that needs nothing from elsewhere, and its pictures as PNG files beside it."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from fedbn_flwr import __version__
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.recipes.findings import Finding, findings
from fedbn_flwr.experiments.recipes.table import values_of
from fedbn_flwr.experiments.reports.bars import bars
from fedbn_flwr.experiments.reports.curves import SETTINGS, curves
from fedbn_flwr.experiments.reports.how import facts, options_in_common
from fedbn_flwr.experiments.reports.progress import Progress
from fedbn_flwr.experiments.reports.sources import Source
from fedbn_flwr.experiments.reports.style import Picture
from fedbn_flwr.experiments.reports.tables import Cell, Table, cost_table, counts, result_table, run_table
from fedbn_flwr.state.record_files import write_bytes

PAGE = "report.html"
#: letters of a cell that may be broken into lines
LONG = 28
#: headings of what is said about the paper's statements
VERDICTS = {False: "Does not hold here", True: "Holds here", None: "Not run"}
SMALL = "Run in small, on other data than the paper's: numbers say whether a method does what it should, and no more."
CLASSES = {False: "no", True: "yes", None: "open"}


@dataclass(frozen=True)
class Part:
    """One source as it stands in the page."""

    source: Source
    pictures: Sequence[Picture]
    html: str


def write_report(sources: Sequence[Source], folder: Path, refresh: int = 0) -> Path:
    """Write the page and its pictures; return the page's path. With `refresh` it loads again after so many seconds."""
    make_folder(folder)
    parts = [_part(source, number, len(sources) > 1) for number, source in enumerate(sources, start=1)]
    for number, part in enumerate(parts, start=1):
        for picture in part.pictures:
            prefix = f"{number}-" if len(parts) > 1 else ""
            write_bytes(folder / f"{prefix}{picture.name}.png", picture.png)
    write_bytes(folder / PAGE, _page(parts, refresh).encode())
    return folder / PAGE


def _page(parts: Sequence[Part], refresh: int) -> str:
    titles = [part.source.title for part in parts]
    links = "".join(f'<li><a href="#part-{n}">{escape(title)}</a></li>' for n, title in enumerate(titles, start=1))
    return Template(_template("page.html")).substitute(
        title=escape(titles[0] if len(titles) == 1 else f"{len(titles)} results"),
        refresh=f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "",
        style=_template("page.css"),
        script=_template("page.js"),
        summary=escape(counts([run for part in parts for run in part.source.runs])),
        contents=f"<nav><ul>{links}</ul></nav>" if len(parts) > 1 else "",
        body="\n".join(part.html for part in parts),
        version=__version__,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )


def _part(source: Source, number: int, several: bool) -> Part:
    values = values_of(source.results, source.record.rounds if source.record else 1)
    pictures = [*bars(source, values), *curves(source)]
    blocks = [
        f'<section id="part-{number}">',
        f"<h2>{escape(source.title)}</h2>" if several else "",
        _about(source),
        _progress(source),
        _findings(findings(source.results, values)),
        _table(result_table(source, values)),
        _pictures(pictures, source),
        _table(cost_table(source)),
        _how(source),
        _notes(source),
        "</section>",
    ]
    return Part(source, pictures, "\n".join(filter(None, blocks)))


def _about(source: Source) -> str:
    text = ". ".join(filter(None, (source.recipe.place, source.recipe.about)))
    about = f'<p class="about">{escape(text)}</p>' if text else ""
    small = f'<p class="small">{SMALL}</p>' if source.record and source.record.smoke else ""
    return about + small


def _progress(source: Source) -> str:
    progress = Progress.of(source)
    if progress.complete:
        return ""
    return f'<p>{escape(progress.text)}</p><progress value="{progress.share:.4f}">{progress.share:.0%}</progress>'


def _findings(items: Sequence[Finding]) -> str:
    blocks = []
    for holds, heading in VERDICTS.items():
        chosen = [item for item in items if item.holds is holds]
        if chosen:
            lines = "".join(f"<li>{_finding(item)}</li>" for item in chosen)
            heading = f"{heading} ({len(chosen)})"
            blocks.append(f'<div class="finding {CLASSES[holds]}"><h4>{heading}</h4><ul>{lines}</ul></div>')
    return f'<h3>What the paper states</h3><div class="findings">{"".join(blocks)}</div>' if blocks else ""


def _finding(item: Finding) -> str:
    details = "".join(f"<li>{escape(detail)}</li>" for detail in item.details)
    return escape(item.text) + (f"<ul>{details}</ul>" if details else "")


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    kinds = ["number" if index in table.numeric else "text" for index in range(len(table.headings))]
    pairs = zip(kinds, table.headings, strict=True)
    head = "".join(f'<th scope="col" class="{kind}"><button>{escape(text)}</button></th>' for kind, text in pairs)
    classes = ["method" if text == "method" else kind for kind, text in zip(kinds, table.headings, strict=True)]
    body = "\n".join(f"<tr>{''.join(map(_cell, row, classes))}</tr>" for row in table.rows)
    caption = escape(table.caption)
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
    inner = f"<caption><span>{caption}</span></caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    return f'<h3>{escape(table.name.capitalize())}</h3>{region}<table class="{table.name}">{inner}</table></div>'


def _cell(cell: Cell, kind: str) -> str:
    number = "" if cell.number is None else f' data-number="{cell.number!r}"'
    kind += " long" if len(cell.text) > LONG else ""
    return f'<td class="{kind}"{number}>{escape(cell.text)}</td>'


def _pictures(pictures: Sequence[Picture], source: Source) -> str:
    if not pictures:
        return ""
    settings = len({run.setting for run in source.runs if run.rows})
    left_out = (
        f"<p>Curves of {SETTINGS} of {settings} settings: `fedbn-flwr report` draws all of a setting's folder.</p>"
    )
    figures = "\n".join(map(_figure, pictures))
    return f'<h3>Pictures</h3>{left_out if settings > SETTINGS else ""}<div class="pictures">{figures}</div>'


def _figure(picture: Picture) -> str:
    caption, data = escape(picture.caption), b64encode(picture.png).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
    )


def _how(source: Source) -> str:
    options = options_in_common(source.runs)
    shared = _details(f"Options that all runs share ({len(options)})", _list(list(options.items())))
    runs = _details(f"All runs ({len(source.runs)})", _table(run_table(source)))
    return f"<h3>What ran, and how</h3>{_list(facts(source))}{shared}{runs}"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _list(pairs: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in pairs)}</dl>"


def _notes(source: Source) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in source.recipe.notes)
    return f"<h3>Notes</h3><ul>{notes}</ul>" if notes else ""


def _template(name: str) -> str:
    return (files(__package__) / "template" / name).read_text()
