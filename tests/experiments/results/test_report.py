"""The page of a report: what it says of finished, failed and unfinished results, and that it stands
alone.
"""

import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.recipes.paper import QUANTITIES
from fedbn_flwr.experiments.results.plots import (
    COLOURS,
    FIXED,
    bar_style,
    bars,
    draw_marks,
    line_style,
    looks_of,
    marks_of,
)
from fedbn_flwr.experiments.results.rows import pd, read_parts
from tests.helpers.matrix_files import (
    ROUNDS,
    round_row,
    summary_of,
    write_comparison,
    write_finished,
    write_matrix,
    write_run,
    write_study,
)
from tests.helpers.runs import run, run_in

SCORE = "accuracy, %"
ALL = {
    ("IID, E=1", "BN"): (0.9, 0.8),
    ("IID, E=1", "GN"): (0.7, 0.7),
    ("Shards, E=1", "BN"): (0.5, 0.5),
    ("Shards, E=1", "GN"): (0.75, 0.75),
    ("IID, E=9", "BN"): (0.9, 0.9),
    ("IID, E=9", "GN"): (0.8, 0.8),
    ("Shards, E=9", "BN"): (0.6, 0.6),
    ("Shards, E=9", "GN"): (0.5, 0.5),
}


class Page(HTMLParser):
    """The tables, pictures and words of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.tables: dict[str, list[list[str]]] = {}
        self.pictures: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self._table, self._cell = "", False
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action")
        ]
        if tag == "table":
            self._table = given["class"] or ""
            self.tables[self._table] = []
        if tag == "tr":
            self.tables[self._table].append([])
        if tag in ("td", "th"):
            self.tables[self._table][-1].append("")
            self._cell = True
        if tag == "img":
            self.pictures.append(given["alt"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[self._table][-1][-1] += data

    def cell(self, table: str, heading: str, *begin: str) -> str:
        """The text in a column, of the only row that begins with these cells."""
        rows = self.tables[table]
        (found,) = [row for row in rows[1:] if row[: len(begin)] == list(begin)]
        return found[rows[0].index(heading)]


def write_page(*folders: Path, out: Path) -> Page:
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    return Page(out / "report.html")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Return the page of a finished matrix; with all its pictures it takes seconds."""
    folder = tmp_path_factory.mktemp("whole")
    return write_page(write_matrix(folder, ALL), out=folder / "page")


@pytest.mark.slow
def test_a_matrix_stands_beside_the_papers_numbers(whole: Page) -> None:
    page = whole
    # a row for each method of each setting, the score first
    assert len(page.tables["results"]) == 1 + len(ALL)
    assert page.tables["results"][0][:5] == [
        "setting",
        "method",
        "accuracy, %",
        "vs BN",
        "page 7",
    ]
    cell = ("IID, E=1", "BN")
    # of 90 and 80: the sample's deviation
    assert page.cell("results", "accuracy, %", *cell) == "85.00 ± 7.07"
    assert page.cell("results", "page 7", *cell) == "90.10 ± 0.40"
    # paired by seed, 70 - 90 and 70 - 80; t of one degree of freedom is 12.706
    assert page.cell("results", "vs BN", "IID, E=1", "GN") == "-15.00 ± 63.53"
    assert page.cell("results", "vs BN", *cell) == ""
    assert page.cell("results", "page 7", "Shards, E=9", "BN") == ""
    assert page.cell("costs", "MB a round, as papers count", "IID, E=1", "GN") == "1.00"
    assert page.cell("costs", "MB sent", "IID, E=1", "GN") == "2.0"
    assert "8 finished" not in page.text
    assert "16 runs: 16 finished" in page.text
    assert "torch 2.9" in page.text
    assert "fedbn-flwr ..." in page.text


def test_a_report_says_where_the_paper_does_not_hold(whole: Page) -> None:
    page = whole
    against, _, rest = page.text.partition("Does not hold here (2)")[2].partition("Results")
    assert (
        "BN > GN in Shards, E=1, accuracy: printed 80.0 and 40.0, here 50.00 ± 0.00 and 75.00 ± "
        "0.00" in against
    )
    assert "Direction: GN > BN in E=1: does not agree in 1 of 2 settings" in against
    assert "seen in <small> only" in rest


def test_pictures_are_in_the_page_and_beside_it(whole: Page) -> None:
    page = whole
    for start in (
        "Accuracy by domain in IID, E=1",
        "Accuracy against rounds in Shards, E=9",
        "Accuracy against exchanges in",
        "Accuracy against bytes in",
        "Training loss in",
    ):
        assert [alt for alt in page.pictures if alt.startswith(start)], start
    files = list(page.path.parent.glob("*.png"))
    assert len(files) == len(page.pictures) == len(set(page.pictures))
    for path in files:
        with Image.open(path) as image:
            # sharp in print, and not too wide for a phone
            assert image.width == 1040


def test_the_page_stands_alone(whole: Page) -> None:
    page = whole
    assert page.addresses
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    text = page.path.read_text()
    assert not re.findall(r"@import|url\(|https?:", text)
    # a paper's words are text and no markup
    assert "<and steps>" not in text
    assert "GN & BN over partitions <and steps>" in page.text


def test_failed_unfinished_and_waiting_cells_are_named(tmp_path: Path) -> None:
    matrix = write_matrix(tmp_path, {("IID, E=1", "BN"): (0.9, 0.8)})
    (matrix / "IID__E=1-GN-seed0").mkdir()
    failed = {"method": "fedavg+gn", "seed": 0, "failed": "the loss is <nan>"}
    (matrix / "IID__E=1-GN-seed0/summary.json").write_text(json.dumps(failed))
    write_run(matrix / "Shards__E=1-BN-seed0", [round_row(1, 0.3), round_row(2, 0.4)])
    with (matrix / "Shards__E=1-BN-seed0/rounds.jsonl").open("a") as file:
        file.write('{"round": Infinity}\n{"round": 3, "acc')  # a row that is written just now
    page = write_page(matrix, out=tmp_path / "page")
    assert page.cell("results", SCORE, "IID, E=1", "GN") == "failed"
    assert page.cell("results", SCORE, "Shards, E=1", "BN") == "unfinished"
    assert page.cell("results", SCORE, "Shards, E=9", "GN") == "waiting"
    assert "Failed: GN | IID, E=1: the loss is <nan>" in page.text
    assert page.cell("runs", "rounds done", "Shards, E=1", "BN", "0") == "2"
    assert page.cell("runs", "of", "Shards, E=1", "BN", "0") == str(ROUNDS)
    assert "Accuracy against rounds in Shards, E=1" in page.pictures
    # one round is a point, and no curve
    (matrix / "Shards__E=1-BN-seed0/rounds.jsonl").write_text(json.dumps(round_row(1, 0.3)))
    assert (
        "Accuracy against rounds in Shards, E=1"
        not in write_page(matrix, out=tmp_path / "again").pictures
    )


def test_bytes_and_exchanges_are_counted_as_papers_do(tmp_path: Path) -> None:
    quantities = ["domain-accuracy", "loss", "megabytes", "gigabytes", "extra-exchanges"]
    matrix = write_matrix(
        tmp_path, {("IID, E=1", "BN"): (0.5,)}, quantities=quantities, reported=[], directions=[]
    )
    path = matrix / "IID__E=1-BN-seed0/summary.json"
    domains = {"domain-accuracy": {"a": 0.25, "b": 0.75}, "loss": None}
    counted = {"paper-bytes": 3 * 2**30, "rounds": 3, "exchanges": 12}
    path.write_text(json.dumps(json.loads(path.read_text()) | domains | counted))
    page, cell = write_page(matrix, out=tmp_path / "page"), ("IID, E=1", "BN")
    columns = (
        "a, %",
        "b, %",
        "Average, %",
        "MiB a round",
        "GiB in total",
        "share of extra exchanges, %",
    )
    numbers = [page.cell("results", heading, *cell) for heading in columns]
    # in as many rounds as the study has at full size
    assert numbers == ["25.00", "75.00", "50.00", "1024.00", f"{ROUNDS}.00", "75.00"]
    # methods are compared by the mean over domains where there is no other score
    assert page.tables["results"][0][:3] == ["setting", "method", "Average, %"]
    assert "loss" not in page.tables["results"][0]


def test_a_run_that_stopped_early_has_the_rounds_that_it_ran(tmp_path: Path) -> None:
    quantities = ["megabytes", "extra-exchanges"]
    matrix = write_matrix(
        tmp_path, {("IID, E=1", "BN"): (0.9,)}, quantities=quantities, reported=[], directions=[]
    )
    path = matrix / "IID__E=1-BN-seed0/summary.json"
    ended = {"rounds": 20, "stopped-after": 2, "exchanges": 8, "paper-bytes": 2 * 2**20}
    path.write_text(json.dumps(json.loads(path.read_text()) | ended))
    page, cell = write_page(matrix, out=tmp_path / "page"), ("IID, E=1", "BN")
    assert page.cell("results", "MiB a round", *cell) == "1.00"
    assert page.cell("results", "share of extra exchanges, %", *cell) == "75.00"
    assert page.cell("costs", "rounds", *cell) == "2"
    assert page.cell("costs", "MB a round, as papers count", *cell) == "1.05"


def test_a_matrix_before_its_first_round(tmp_path: Path) -> None:
    page = write_page(write_matrix(tmp_path, {}), out=tmp_path / "page")
    assert "16 runs: 16 waiting" in page.text
    assert page.pictures == []


def test_what_single_methods_record_is_drawn(tmp_path: Path) -> None:
    rows = [
        round_row(n, 0.5, **{"fedbs-stage": 1 + (n > 2), "loss-deviation": 1 / n})
        for n in range(1, 5)
    ]
    write_run(tmp_path / "one", rows)
    page = write_page(tmp_path / "one", out=tmp_path / "page")
    assert "Standard deviation of the clients' losses" in page.pictures


def test_runs_and_comparisons_in_one_page(tmp_path: Path) -> None:
    assert run("run", method="fedavg", results_dir=str(tmp_path / "one")) == 0
    # an option that only some methods have is for these
    words = ["--methods", "fedavg,fixbn", "--seeds", "2", "--freeze-round", "1"]
    assert run("compare", *words, results_dir=str(tmp_path / "both")) == 0
    first = run_in(tmp_path / "both", "fedavg", 0)
    page = write_page(tmp_path / "both", first, tmp_path / "one", out=tmp_path / "page")
    assert "2 results" in page.text
    assert "6 runs: 6 finished" in page.text
    # both are fedavg with one seed: the folders tell them apart
    assert page.cell("results", SCORE, first.name)
    assert page.cell("results", SCORE, run_in(tmp_path / "one").name)


def test_a_file_that_is_none_of_ours_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.json").write_text('{"title": "mine"}')
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "study.json is not the record of a study" in line


def painted(folder: Path, start: str) -> Any:
    """Return the axes of the only picture of a study whose caption starts so."""
    (part,) = read_parts([folder])
    (picture,) = [each for each in bars(part.runs, part.paper) if each.caption.startswith(start)]
    axes = Figure().add_subplot()
    picture.paint(axes)
    return axes


def test_bars_by_domain_are_of_domains(tmp_path: Path) -> None:
    """Of every quantity that a single run or a recipe may have beside."""
    cells = {("", "BN"): (0.9, 0.8), ("", "GN"): (0.7, 0.7)}
    matrix = write_matrix(
        tmp_path, cells, quantities=[*QUANTITIES], vary={}, reported=[], directions=[]
    )
    for path in matrix.glob("*/summary.json"):
        path.write_text(
            json.dumps({**dict.fromkeys(QUANTITIES, 1.0), **json.loads(path.read_text())})
        )
    axes = painted(matrix, "Accuracy by domain")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["photo", "sketch", "Average"]
    assert [bar.get_height() for bar in axes.containers[1]] == pytest.approx([85, 42.5, 63.75])


def test_every_one_of_many_methods_has_a_look_of_its_own() -> None:
    lines = [line_style(look) for look in range(30)]
    assert len({(line["color"], line["linestyle"]) for line in lines}) == 30
    assert len({(line["color"], line["marker"]) for line in lines}) == 30
    assert len({(bar["color"], bar["hatch"]) for bar in map(bar_style, range(30))}) == 30


def test_a_method_looks_the_same_in_every_study() -> None:
    """Whatever it is called there, and whatever else is there; of the same method twice, the second
    differs.
    """
    one = pd.DataFrame({"label": ["mine", "FixBN", "BN"], "method": ["fedprox", "fixbn", "fedavg"]})
    other = pd.DataFrame(
        {"label": ["fedavg", "again", "fixbn"], "method": ["fedavg", "fedavg", "fixbn"]}
    )
    looks, others = looks_of(one), looks_of(other)
    assert (looks["BN"], looks["FixBN"]) == (others["fedavg"], others["fixbn"])
    assert len({*looks.values()}) == len({*others.values()}) == 3
    # nobody else has the look of a method that is not here
    assert min(looks["mine"], others["again"]) >= len(FIXED)


def test_colours_remain_apart_with_red_green_blindness() -> None:
    """By CIE 1976's distance in L*a*b*, in which 2.3 is just seen, under deuteranopia as Machado
    (2009) models it.
    """
    levels = np.array(
        [[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in COLOURS]
    )
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    deuteranopia = [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ]
    white_xyz = [
        [0.412456, 0.357576, 0.180438],
        [0.212673, 0.715152, 0.072175],
        [0.019334, 0.119192, 0.950304],
    ]
    for seen in (linear, (linear @ np.transpose(deuteranopia)).clip(0, 1)):
        x, y, z = np.cbrt(seen @ np.transpose(white_xyz) / np.sum(white_xyz, axis=1)).T
        lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], axis=-1)
        apart = np.linalg.norm(lab[:, None] - lab, axis=-1)
        assert apart[~np.eye(len(lab), dtype=bool)].min() > 15


def comparison(folder: Path, *cells: tuple[str, int, float | None]) -> Path:
    """Write a comparison of methods with a seed and an accuracy; one without has not begun."""
    ended = [
        {
            "method": method,
            **(summary_of(accuracy, seed) if accuracy is not None else {"seed": seed}),
        }
        for method, seed, accuracy in cells
    ]
    return write_comparison(folder, ended)


def test_runs_of_a_comparison_that_have_not_begun_are_waiting(tmp_path: Path) -> None:
    folder = comparison(tmp_path, ("fedavg", 0, 0.5), ("fedavg", 1, None), ("fixbn", 0, None))
    page = write_page(folder, out=tmp_path / "page")
    assert "3 runs: 1 finished, 2 waiting" in page.text
    assert page.cell("results", SCORE, "fixbn") == "waiting"


def test_one_seed_is_said_once_and_zero_has_no_sign(tmp_path: Path) -> None:
    page = write_page(
        comparison(tmp_path, ("fedavg", 0, 0.5), ("fixbn", 0, 0.49999)), out=tmp_path / "page"
    )
    assert page.text.count("One seed: a difference may be chance.") == 1
    assert page.cell("results", "vs fedavg", "fixbn") == "+0.00"
    assert "-0.00" not in page.text
    matrix = write_page(
        write_matrix(tmp_path, {("IID, E=1", "BN"): (0.9, 0.8)}), out=tmp_path / "matrix"
    )
    assert "One seed" not in matrix.text


def test_runs_of_several_settings_share_no_picture(tmp_path: Path) -> None:
    for number, (method, partition) in enumerate(
        [("fedavg", "iid"), ("fixbn", "iid"), ("fedavg", "classes:2"), ("fedavg", "Classes-2")]
    ):
        folder = tmp_path / str(number)
        write_run(folder, [round_row(n, 0.5) for n in range(1, ROUNDS + 1)], method)
        config = json.loads((folder / "config.json").read_text())
        config["options"] |= {"partition": partition}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text(json.dumps({"method": method, **summary_of(0.5, 0)}))
    page = write_page(*(tmp_path / str(number) for number in range(4)), out=tmp_path / "page")
    assert page.cell("results", SCORE, "classes:2", "fedavg") == "50.00"
    assert page.cell("results", "vs fedavg", "classes:2", "fedavg") == ""
    assert len(page.tables["results"]) == 1 + 4
    for setting in ("iid", "classes:2", "Classes-2"):
        assert f"Accuracy against rounds in {setting}" in page.pictures
    # also where case does not tell files apart
    files = {path.name.lower() for path in (tmp_path / "page").glob("*.png")}
    assert len(files) == len(page.pictures)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fedavg:lr-schedule=", []),
        ("fedavg:lr-schedule=0.1@0.5,0.1@0.75", [("learning rate", 10), ("learning rate", 15)]),
        (
            "fixbn:freeze-round=0.3:lr-schedule==0.01@freeze",
            [("freeze", 6), ("learning rate", 6)],
        ),
        ("fixbn:freeze-round=0.3:frozen-lr=1:lr-schedule=cosine", [("freeze", 6)]),
        ("fixbn:freeze-round=auto:latest=0.2:frozen-lr=1:lr-schedule=", [("freeze", 4)]),
        ("fedavg:freeze-bn=true:lr-schedule=", []),
        ("fedbs:lr-schedule=:epsilon=100:patience-rounds=3", [("stage 2", 3)]),
    ],
)
@pytest.mark.sampled(3)
def test_freezes_and_rate_drops_are_marked(
    method: str, expected: list[tuple[str, int]], tmp_path: Path
) -> None:
    longer = f"{method}:rounds=20:local-steps=1:evaluate-every=20"
    assert run("run", method=longer, results_dir=str(tmp_path)) == 0
    marks = marks_of(pd.DataFrame(read_rounds(run_in(tmp_path))))
    assert marks == expected
    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([1, 20], [0, 1])
    draw_marks(axes, {method: marks}, {method: 0})
    # their names stand above the axes, not on lines
    figure.draw_without_rendering()
    assert all(text.get_window_extent().y0 >= axes.bbox.y1 for text in axes.texts)
    assert [float(np.asarray(line.get_xdata())[0]) for line in axes.lines[1:]] == sorted(
        {after + 0.5 for _, after in expected}
    )


HARD = r"a_b&50%#{x}~^\<|[*]"


@pytest.mark.usefixtures("drawn")
def test_every_format_has_the_same_table(tmp_path: Path) -> None:
    runs = [
        {"labels": {}, "label": name, "method": name, "seed": 0, "folder": name}
        for name in ("fedavg", HARD)
    ]
    folder = write_study(tmp_path, {"methods": ["fedavg", "fixbn"]}, runs)
    for place, accuracy in zip(runs, (0.75, 0.5), strict=True):
        write_finished(folder / str(place["folder"]), accuracy)
    assert main(["report", str(folder), "--format", "html,csv,latex"]) == 0
    out = folder / "report"
    rows = list(csv.reader((out / "results.csv").read_text().splitlines()))
    assert rows[0][:3] == ["method", SCORE, "vs fedavg"]
    assert rows[2][:3] == [HARD, "50.0", "-25.0"]
    lines = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert [(row["method"], row[SCORE], row["state"]) for row in lines] == [
        ("fedavg", "75.0", "finished"),
        (HARD, "50.0", "finished"),
    ]
    latex = (out / "results.tex").read_text()
    assert [latex.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    hard = r"a\_b\&50\%\#\{x\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}\textbar{}{[}{*}]"
    assert rf"{hard} & 50.00 & $-$25.00" in latex
    assert "One seed: a difference may be chance." in latex
    pictures = list(out.glob("*.pdf"))
    assert pictures
    assert all(picture.read_bytes().startswith(b"%PDF") for picture in pictures)
    assert (out / "report.html").exists()
    document = (
        r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{results}\end{document}"
    )
    (out / "example.tex").write_text(document)
    if pdflatex := shutil.which("pdflatex"):  # Debian: texlive-latex-recommended
        words = [pdflatex, "-interaction=nonstopmode", "-halt-on-error", "example.tex"]
        assert (
            subprocess.run(words, cwd=out, stdout=subprocess.DEVNULL, check=False).returncode == 0
        )
