"""The files of a report: a page that needs nothing from elsewhere, and what a paper takes up."""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbn_flwr import __version__
from fedbn_flwr.experiments.output.console import say
from fedbn_flwr.experiments.output.run_folder import make_folder, read_config
from fedbn_flwr.experiments.recipes.statements import statements
from fedbn_flwr.experiments.results.plots import SETTINGS, Picture, bars, curves
from fedbn_flwr.experiments.results.rows import Part, counts, read_parts, rounds_of
from fedbn_flwr.experiments.results.show import render, to_csv, to_latex
from fedbn_flwr.experiments.results.tables import all_runs, costs, results
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.whole_files import write_bytes


class PagePart:
    """One part as it stands in the report; `template/page.html` shows its attributes."""

    def __init__(self, part: Part, prefix: str) -> None:
        """With `prefix` the names of the part's files begin."""
        runs = part.runs
        paper = part.paper
        self.part = part
        self.prefix = prefix
        self.results = results(runs, paper)
        self.costs = costs(runs)
        self.runs = all_runs(runs)
        self.tables = [shown for shown in (self.results, self.costs) if len(shown.frame)]
        # they are not drawn yet
        self.pictures = named_apart([*bars(runs, paper), *curves(runs)])
        self.statements = statements(runs, paper)
        self.settings_left_out = max(0, rounds_of(runs)["setting"].nunique() - SETTINGS)

    def draw(self, folder: Path, kind: str) -> list[bytes]:
        """Write all pictures as files of a kind; return their contents."""
        contents = [picture.file(kind) for picture in self.pictures]
        for picture, content in zip(self.pictures, contents, strict=True):
            write_bytes(folder / f"{self.prefix}{picture.name}.{kind}", content)
        return contents

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        """What the runs have written about themselves; nothing of a run that has not begun."""
        return [read_config(Path(folder)) for folder in self.part.runs["folder"]]

    def facts(self) -> list[tuple[str, str]]:
        """Return what ran and how, each fact with its name.

        Different values of the runs stand side by side.
        """
        facts: dict[str, list[str]] = {"command": [], "versions": [], "machine": []}
        for own in self.configs:
            versions = own.get("versions", {}).items()
            cores = f"{own['cores']} cores" if own.get("cores") else ""
            machine = [own.get("hardware", ""), cores, own.get("system", "")]
            facts["command"].append(self.part.command or str(own.get("command", "")))
            facts["versions"].append(", ".join(f"{name} {version}" for name, version in versions))
            facts["machine"].append(", ".join(filter(None, machine)))
        return [
            (name, text)
            for name, texts in facts.items()
            for text in dict.fromkeys(filter(None, texts))
        ]

    def options(self) -> dict[str, str]:
        """Return the options that all begun runs share."""
        begun = [config["options"] for config in self.configs if config.get("options")]
        first = begun[0] if begun else {}
        return {
            key: str(value)
            for key, value in first.items()
            if all(other.get(key) == value for other in begun)
        }


def named_apart(pictures: Sequence[Picture]) -> list[Picture]:
    """Return pictures with files of their own, where the names of two settings differ by signs that
    no file has, or by upper case.
    """
    named = dict[str, Picture]()
    for picture in pictures:
        name = picture.name
        number = 1
        while name.lower() in named:
            number += 1
            name = f"{picture.name}-{number}"
        named[name.lower()] = replace(picture, name=name)
    return [*named.values()]


def _write_html(parts: Sequence[PagePart], folder: Path) -> str:
    images = [
        [b64encode(content).decode() for content in part.draw(folder, "png")] for part in parts
    ]
    page = render(
        "page.html",
        parts=list(zip(parts, images, strict=True)),
        title=parts[0].part.title if len(parts) == 1 else f"{len(parts)} results",
        summary=counts([state for part in parts for state in part.part.runs["state"]]),
        version=__version__,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )
    write_bytes(folder / "report.html", page.encode())
    return "report.html (and its pictures as PNG files)"


def _write_csv(parts: Sequence[PagePart], folder: Path) -> str:
    for part in parts:
        for shown in (part.results, part.runs):
            write_bytes(folder / f"{part.prefix}{shown.name}.csv", to_csv(shown).encode())
    return f"{parts[0].prefix}results.csv (and runs.csv, with a row for each run)"


def _write_latex(parts: Sequence[PagePart], folder: Path) -> str:
    for part in parts:
        part.draw(folder, "pdf")
        for shown in part.tables:
            write_bytes(folder / f"{part.prefix}{shown.name}.tex", to_latex(shown).encode())
    return (
        f"{parts[0].prefix}results.tex (and other tables, for booktabs, and pictures as PDF files)"
    )


#: format -> what writes it, and returns the name of its main file, and what stands beside it
WRITERS: dict[str, Callable[[Sequence[PagePart], Path], str]] = {
    "html": _write_html,
    "csv": _write_csv,
    "latex": _write_latex,
}


def report(options: Mapping[str, Any]) -> None:
    """Write the page, and the files of other formats."""
    folders = [Path(name).expanduser() for name in options["runs"]]
    out = options.get("out")
    if out:
        folder = Path(out).expanduser()
    elif len(folders) == 1:
        folder = folders[0] / "report"
    else:
        folder = Path("results/report")
    formats = list(dict.fromkeys(name.strip() for name in str(options["format"]).split(",")))
    unknown = [name for name in formats if name not in WRITERS]
    if unknown:
        raise UsageError(f"unknown format {unknown[0]!r}; {did_you_mean(unknown[0], WRITERS)}")
    read = read_parts(folders)
    make_folder(folder)
    parts = [
        PagePart(part, f"{n}-" if len(read) > 1 else "") for n, part in enumerate(read, start=1)
    ]
    say(f"Report: {folder.resolve()}/{WRITERS[name](parts, folder)}" for name in formats)
