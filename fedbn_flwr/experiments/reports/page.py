"""The files of a report: a page that needs nothing from elsewhere, and what a paper takes up."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from fedbn_flwr import __version__
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.recipes.findings import findings
from fedbn_flwr.experiments.recipes.table import values_of
from fedbn_flwr.experiments.reports.bars import bars
from fedbn_flwr.experiments.reports.curves import SETTINGS, curves
from fedbn_flwr.experiments.reports.documents import html, latex, to_csv, to_pdf
from fedbn_flwr.experiments.reports.sources import Progress, Source, counts
from fedbn_flwr.experiments.reports.tables import cost_table, curve_table, result_table, run_table
from fedbn_flwr.state.record_files import write_bytes

PAGE = "report.html"
#: keys of `config.json` that tell the machine
MACHINE = ("hardware", "cores", "system")
#: what the report tells of how runs were made
ORDER = ("command", "versions", "machine")


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
        self.findings, self.progress = findings(source.results, values), Progress.of(source)
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


def write_report(
    sources: Sequence[Source], folder: Path, refresh: int = 0, formats: Sequence[str] = ("html",)
) -> list[Path]:
    """Write the report; return the main file of each format. With `refresh` the page reloads after so many seconds."""
    make_folder(folder)
    prefixes = [f"{number}-" if len(sources) > 1 else "" for number in range(1, len(sources) + 1)]
    parts = [Part(source, folder, prefix) for source, prefix in zip(sources, prefixes, strict=True)]
    return [folder / WRITERS[name](parts, folder, refresh) for name in formats]


def _write_html(parts: Sequence[Part], folder: Path, refresh: int) -> str:
    images = [[b64encode(content).decode() for content in part.draw("png").values()] for part in parts]
    page = html(
        "page.html",
        parts=list(zip(parts, images, strict=True)),
        title=parts[0].source.title if len(parts) == 1 else f"{len(parts)} results",
        summary=counts([run for part in parts for run in part.source.runs]),
        refresh=refresh,
        version=__version__,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )
    write_bytes(folder / PAGE, page.encode())
    return PAGE


def _write_csv(parts: Sequence[Part], folder: Path, _: int) -> str:
    for part in parts:
        for table in (*part.tables, part.runs, curve_table(part.source)):
            write_bytes(folder / f"{part.prefix}{table.name}.csv", to_csv(table).encode())
    return f"{parts[0].prefix}{parts[0].tables[0].name}.csv"


def _write_latex(parts: Sequence[Part], folder: Path, _: int) -> str:
    for part in parts:
        part.draw("pdf")
        for table in part.tables:
            write_bytes(folder / f"{part.prefix}{table.name}.tex", latex("table.tex", table=table).encode())
    write_bytes(folder / "example.tex", latex("example.tex", parts=parts).encode())
    return "example.tex"


def _write_pdf(parts: Sequence[Part], folder: Path, _: int) -> str:
    write_bytes(folder / "report.pdf", to_pdf([(part.source.title, part.tables, part.pictures) for part in parts]))
    return "report.pdf"


def _write_svg(parts: Sequence[Part], _: Path, __: int) -> str:
    names = [name for part in parts for name in part.draw("svg")]
    return names[0] if names else ""


#: format -> what writes it, and returns the name of its main file
WRITERS: dict[str, Callable[[Sequence[Part], Path, int], str]] = {
    "html": _write_html,
    "csv": _write_csv,
    "latex": _write_latex,
    "pdf": _write_pdf,
    "svg": _write_svg,
}
