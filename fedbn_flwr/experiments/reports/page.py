"""The files of a report: a page that needs nothing from elsewhere, and what a paper takes up."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Self

from fedbn_flwr import __version__
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.recipes.findings import Finding, findings
from fedbn_flwr.experiments.recipes.table import Key, Value, values_of
from fedbn_flwr.experiments.reports.bars import bars
from fedbn_flwr.experiments.reports.curves import SETTINGS, curves
from fedbn_flwr.experiments.reports.documents import DOCUMENT, latex_figure, to_csv, to_latex, to_pdf
from fedbn_flwr.experiments.reports.how import facts, options_in_common
from fedbn_flwr.experiments.reports.progress import Progress
from fedbn_flwr.experiments.reports.sources import Source
from fedbn_flwr.experiments.reports.style import Picture
from fedbn_flwr.experiments.reports.tables import Cell, Table, cost_table, counts, curve_table, result_table, run_table
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
    """One source as it stands in the report."""

    source: Source
    #: before the names of its files
    prefix: str
    values: dict[Key, Value]
    tables: Sequence[Table]
    pictures: Sequence[Picture]

    @classmethod
    def of(cls, source: Source, prefix: str) -> Self:
        """Make the tables and pictures of a source; pictures are not drawn yet."""
        values = values_of(source.results, source.record.rounds if source.record else 1)
        tables = [table for table in (result_table(source, values), cost_table(source)) if table.rows]
        return cls(source, prefix, values, tables, [*bars(source, values), *curves(source)])

    def draw(self, folder: Path, kind: str) -> list[str]:
        """Write all pictures as files of a kind; return their names."""
        names = [f"{self.prefix}{picture.name}.{kind}" for picture in self.pictures]
        for name, picture in zip(names, self.pictures, strict=True):
            write_bytes(folder / name, picture.file(kind))
        return names


def write_report(
    sources: Sequence[Source], folder: Path, refresh: int = 0, formats: Sequence[str] = ("html",)
) -> list[Path]:
    """Write the report; return the main file of each format. With `refresh` the page reloads after so many seconds."""
    make_folder(folder)
    parts = [
        Part.of(source, f"{number}-" if len(sources) > 1 else "") for number, source in enumerate(sources, start=1)
    ]
    return [folder / WRITERS[name](parts, folder, refresh) for name in formats]


def _write_html(parts: Sequence[Part], folder: Path, refresh: int) -> str:
    files = [part.draw(folder, "png") for part in parts]
    images = [[(folder / name).read_bytes() for name in names] for names in files]
    bodies = [_section(part, number, len(parts) > 1, images[number - 1]) for number, part in enumerate(parts, start=1)]
    write_bytes(folder / PAGE, _page(parts, bodies, refresh).encode())
    return PAGE


def _write_csv(parts: Sequence[Part], folder: Path, _: int) -> str:
    files = {
        f"{part.prefix}{table.name}.csv": table
        for part in parts
        for table in [*part.tables, run_table(part.source), curve_table(part.source)]
    }
    for name, table in files.items():
        write_bytes(folder / name, to_csv(table).encode())
    return next(iter(files))


def _write_latex(parts: Sequence[Part], folder: Path, _: int) -> str:
    body = []
    for part in parts:
        for table in part.tables:
            write_bytes(folder / f"{part.prefix}{table.name}.tex", to_latex(table).encode())
        body += [rf"\input{{{part.prefix}{table.name}}}" for table in part.tables]
        body += map(latex_figure, part.pictures, part.draw(folder, "pdf"))
        body.append(r"\clearpage")
    write_bytes(folder / "example.tex", (DOCUMENT % "\n".join(body)).encode())
    return "example.tex"


def _write_pdf(parts: Sequence[Part], folder: Path, _: int) -> str:
    documents = [(part.source.title, part.tables, part.pictures) for part in parts]
    write_bytes(folder / "report.pdf", to_pdf(documents))
    return "report.pdf"


def _write_svg(parts: Sequence[Part], folder: Path, _: int) -> str:
    names = [name for part in parts for name in part.draw(folder, "svg")]
    return names[0] if names else ""


#: format -> what writes it, and returns the name of its main file
WRITERS: dict[str, Callable[[Sequence[Part], Path, int], str]] = {
    "html": _write_html,
    "csv": _write_csv,
    "latex": _write_latex,
    "pdf": _write_pdf,
    "svg": _write_svg,
}


def _page(parts: Sequence[Part], bodies: Sequence[str], refresh: int) -> str:
    titles = [part.source.title for part in parts]
    links = "".join(f'<li><a href="#part-{n}">{escape(title)}</a></li>' for n, title in enumerate(titles, start=1))
    return Template(_template("page.html")).substitute(
        title=escape(titles[0] if len(titles) == 1 else f"{len(titles)} results"),
        refresh=f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "",
        style=_template("page.css"),
        script=_template("page.js"),
        summary=escape(counts([run for part in parts for run in part.source.runs])),
        contents=f"<nav><ul>{links}</ul></nav>" if len(parts) > 1 else "",
        body="\n".join(bodies),
        version=__version__,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )


def _section(part: Part, number: int, several: bool, images: Sequence[bytes]) -> str:
    source = part.source
    tables = {table.name: _table(table) for table in part.tables}
    blocks = [
        f'<section id="part-{number}">',
        f"<h2>{escape(source.title)}</h2>" if several else "",
        _about(source),
        _progress(source),
        _findings(findings(source.results, part.values)),
        tables.get("results", ""),
        _pictures(part.pictures, images, source),
        tables.get("costs", ""),
        _how(source),
        _notes(source),
        "</section>",
    ]
    return "\n".join(filter(None, blocks))


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
    classes = [
        text if text in ("setting", "method") else kind for kind, text in zip(kinds, table.headings, strict=True)
    ]
    body = "\n".join(f"<tr>{''.join(map(_cell, row, classes))}</tr>" for row in table.rows)
    caption = escape(table.caption)
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
    inner = f"<caption><span>{caption}</span></caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    footer = f"<p>{escape(table.footer)}</p>" if table.footer else ""
    return (
        f'<h3>{escape(table.name.capitalize())}</h3>{region}<table class="{table.name}">{inner}</table></div>{footer}'
    )


def _cell(cell: Cell, kind: str) -> str:
    number = "" if cell.number is None else f' data-number="{cell.number!r}"'
    kind += " long" if len(cell.text) > LONG else ""
    return f'<td class="{kind}"{number}>{escape(cell.text)}</td>'


def _pictures(pictures: Sequence[Picture], images: Sequence[bytes], source: Source) -> str:
    if not pictures:
        return ""
    settings = len({run.setting for run in source.runs if run.rows})
    left_out = (
        f"<p>Curves of {SETTINGS} of {settings} settings: `fedbn-flwr report` draws all of a setting's folder.</p>"
    )
    blocks = ["<h3>Pictures</h3>", left_out if settings > SETTINGS else ""]
    for setting in dict.fromkeys(picture.setting for picture in pictures):
        pairs = zip(pictures, images, strict=True)
        figures = "\n".join(_figure(picture, image) for picture, image in pairs if picture.setting == setting)
        blocks += [f"<h4>{escape(setting)}</h4>" if setting else "", f'<div class="pictures">{figures}</div>']
    return "\n".join(filter(None, blocks))


def _figure(picture: Picture, image: bytes) -> str:
    caption, data = escape(picture.caption), b64encode(image).decode()
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
