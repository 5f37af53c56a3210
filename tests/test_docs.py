"""What the documentation shows works: Python blocks run, commands parse, links lead somewhere,
tables are complete.
"""

import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from flwr.common.config import parse_config_args

from fedbn_flwr.data import DATASETS, PARTITIONS
from fedbn_flwr.deployment.cli import COMMANDS as DEPLOYMENT
from fedbn_flwr.deployment.cli import parser as deployment_parser
from fedbn_flwr.experiments import resolve
from fedbn_flwr.experiments.cli import _parser, _plugins, main
from fedbn_flwr.experiments.experiment import import_plugins
from fedbn_flwr.experiments.material import load_data
from fedbn_flwr.experiments.recipes.schema import read_recipe, recipe_names
from fedbn_flwr.strategies import REGISTRY
from tests.helpers.checkout import BIN, ROOT, environment, run
from tests.helpers.registered import registries_restored

pytestmark = pytest.mark.usefixtures("only_composed")

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
by_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path, program: str) -> list[list[str]]:
    """The lines of bash blocks and the code within text that call a program, as words."""
    lines = [
        line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += re.findall(r"`([^`\n]+)`", page.read_text())
    return [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith(f"{program} ")
    ]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Forget what a page registers."""
    with registries_restored():
        yield


@pytest.fixture
def folder(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with the files that a page shows: blocks whose first line is `#
    NAME.py`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name != "README.md" else [])
        for page in PAGES
    ],
    ids=NAMES,
)
@pytest.mark.usefixtures("folder")
def test_python_blocks_run(page: Path) -> None:
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        # what a page shows as a module, and imports further down, is defined once
        module = re.match(r"# (\w+)\.py\n", block)
        names["__name__"] = module[1] if module else page.stem
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "docs" / "extending.md"])
@pytest.mark.usefixtures("folder")
def test_each_block_of_a_guide_runs_alone(page: Path) -> None:
    for block in blocks(page, "python"):
        if not re.match(r"# \w+\.py\n", block):
            with registries_restored():
                exec(compile(block, page.name, "exec"), {"__name__": page.stem})


@by_page
@pytest.mark.usefixtures("folder")
def test_commands_are_understood(page: Path) -> None:
    for words in commands(page, "fedbn-flwr"):
        if words[0] == "--version" or words[-1] == "--help":
            continue
        if words[0] in DEPLOYMENT:
            deployment_parser().parse_args(words)
            continue
        import_plugins(_plugins(words))
        options = vars(_parser({}).parse_args(words))
        if words[0] == "reproduce" and words[1] in recipe_names():
            read_recipe(words[1]).only(options.get("only", ())).study.runs(Path("results"))
        if words[0] in ("doctor", "recipes", "reproduce", "results", "report", "data", "list"):
            continue
        given = {key.replace("_", "-"): value for key, value in options.items()}
        for key in (
            "command",
            "engine",
            "verbose",
            "reuse",
            "anew",
            "overwrite",
            "dry-run",
            "seeds",
            "batches",
            "grid",
            "grid-seeds",
        ):
            given.pop(key, None)
        for method in str(given.pop("methods", given.pop("method", "fedavg"))).split(","):
            resolve({**given, "method": method})


@by_page
def test_yaml_blocks_are_matrices(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        if "methods:" in block:
            (tmp_path / "mine.yaml").write_text(block)
            read_recipe(str(tmp_path / "mine.yaml")).study.runs(tmp_path)


@by_page
@pytest.mark.usefixtures("folder")
def test_flower_runs_are_understood(page: Path) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for words in commands(page, "flwr run"):
        for option, value in pairwise(words):
            if option == "--run-config":
                given = parse_config_args([value])
                assert set(given) <= set(known)
                resolve({**known, **given}, federation=True)


@by_page
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {words[0] for words in commands(page, "make")} <= set(targets)


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["options", "projects", "wire"])
def test_a_page_that_is_written_from_the_code_is_up_to_date(name: str) -> None:
    written = runpy.run_path(str(ROOT / "docs" / f"make_{name}.py"))["page"]()
    assert (ROOT / "docs" / f"{name}.md").read_text() == written, "run `make docs`"


class Links(HTMLParser):
    """The targets of a page's links and pictures, and the names of its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets, self.anchors = list[str](), set[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [unquote(value) for key, value in attrs if key in ("href", "src") and value]
        self.anchors |= {value for key, value in attrs if key == "id" and value}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ("--strict", "--quiet", "--site-dir", site)
    run(BIN / "mkdocs", "build", *options, env=environment(NO_MKDOCS_2_WARNING="1"))
    for page in PAGES:
        if page.parent.name == "docs" and page.stem != "index":
            assert (site / page.stem / "index.html").exists()
    pages = {
        path.resolve(): Links(path) for path in site.rglob("*.html") if path.name != "404.html"
    }
    assert len(pages) > len(PAGES)
    lost = []
    for path, links in pages.items():
        for target in links.targets:
            file, _, anchor = target.partition("#")
            to = (path.parent / file if file else path).resolve()
            to = to / "index.html" if to.is_dir() else to
            if "://" not in target and not (
                to.exists() and (not anchor or anchor in pages[to].anchors)
            ):
                lost.append((path.relative_to(site.resolve()).as_posix(), target))
    assert lost == []
    raw = [
        path.parent.name
        for path, links in pages.items()
        if any(".ipynb" in target for target in links.targets)
    ]
    assert raw == ["first-steps"]
    home = pages[(site / "index.html").resolve()].anchors
    assert "what-to-use" in home
    assert "try-it" not in home  # of README's first screen


@pytest.mark.parametrize(
    ("name", "function"),
    [("pyproject.toml", "with_run_config"), ("docs/methods.md", "with_methods")],
)
def test_a_part_that_is_written_from_the_code_is_up_to_date(name: str, function: str) -> None:
    text = (ROOT / name).read_text()
    written = runpy.run_path(str(ROOT / "docs" / "make_options.py"))[function](text)
    assert text == written, "run `make docs`"


def test_pages_of_names_are_up_to_date() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    for page in module["PAGES"]:
        assert page.read_text() == module["written"](page.read_text()), "run `make docs`"


def test_every_picture_is_shown_by_a_page() -> None:
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"\]\((?:docs/)?([\w-]+\.png)\)", page.read_text())
    }
    assert shown == {path.name for path in (ROOT / "docs").glob("*.png")}


def test_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:fedbn_flwr|strategies|tests|apps|docs|recipes)/[\w/.-]*)`", text)
    assert len(named) > 50
    assert [name for name in named if not (ROOT / name).exists()] == ["recipes/PAPER/"]


def test_each_recipe_of_this_project_has_its_hours() -> None:
    table = (ROOT / "docs/recipes.md").read_text().partition("| hours |")[2].partition("\n\n")[0]
    own = {name.removeprefix("here/") for name in recipe_names() if name.startswith("here/")}
    assert own == set(re.findall(r"`([a-z0-9-]+)`", table)) - {"here"}


def test_tables_of_results_follow_from_the_runs() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "make_results.py"))
    assert {
        *re.findall("<!-- table: (.*?) -->", "".join(map(Path.read_text, module["PAGES"])))
    } == {*module["TABLES"]}
    for page in module["PAGES"]:
        assert page.read_text() == module["written"](page.read_text()), "run `make docs`"


def test_runs_of_results_have_the_rates_that_were_best_on_held_out_data() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "make_results.py"))
    used = module["rates_used"]()
    best = {
        key: module["best_rate"](scores) for key, scores in module["rates"]().items() if key in used
    }
    assert best == {key: used[key] for key in best}


def test_accuracies_in_sentences_of_results_are_in_a_table() -> None:
    pages = [
        page.read_text() for page in runpy.run_path(str(ROOT / "docs" / "make_results.py"))["PAGES"]
    ]
    lines = [
        line
        for page in pages
        for line in re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()
    ]
    tables = "".join(line for line in lines if line.startswith("|"))
    sentences = "\n".join(line for line in lines if not line.startswith("|"))
    number = r"(?<![\w.,:])[2-9]\d\.\d(?!\d)"
    known, said = set(re.findall(number, tables)), set(re.findall(number, sentences))
    assert said - known == set()


def test_every_method_data_set_and_partition_is_explained() -> None:
    methods, data = ((ROOT / "docs" / name).read_text() for name in ("methods.md", "data.md"))
    assert [name for name in REGISTRY if f"\n| `{name}` |" not in methods] == []
    assert [name for name in DATASETS if f"`{name}" not in data] == []
    assert [kind.form for kind in PARTITIONS.values() if f"| `{kind.form}` |" not in data] == []


#: what no test can have, what takes longer than a test may, and two rounds that only show memory
ELSEWHERE = {"cifar10", "fashion-mnist", "ray", "--resume", "10000", "--chunk"}


def experiments(page: Path) -> list[list[str]]:
    """The page's runs and comparisons, without those that only name the command."""
    calls = [
        words
        for words in commands(page, "fedbn-flwr")
        if words[0] in ("run", "compare") and len(words) > 2
    ]
    return [words for words in calls if not ELSEWHERE & set(words)]


def shortened(words: list[str], most: int) -> list[str]:
    """The command, with at most so many rounds of one seed at one rate."""
    options = dict(zip(words[1::2], words[2::2], strict=True))
    for name in ("--grid", "--seeds", "--engine"):
        options.pop(name, None)
    rounds = str(min(int(options.get("--rounds", 60)), most))
    return [words[0], *chain(*{**options, "--rounds": rounds, "--evaluate-every": rounds}.items())]


def experiments_of_pages() -> Iterator[Any]:
    """Yield every page's experiments; in the usual run is the README's first, with few rounds."""
    for page in PAGES:
        for number, words in enumerate(experiments(page)):
            usual = page.name == "README.md" and number == 0
            shorter = shortened(words, 4 if usual else 20)
            yield pytest.param(
                page, shorter, id=f"{page.name}-{number}", marks=() if usual else pytest.mark.slow
            )


@pytest.mark.parametrize(("page", "words"), list(experiments_of_pages()))
def test_an_experiment_ends_above_chance(page: Path, words: list[str], folder: Path) -> None:
    if "docs.speakers:speakers" in words:
        pytest.importorskip(
            "aeon", reason="the page says how to install the package that has these data"
        )
    assert main([*words, "--results-dir", str(folder / "results")]) == 0
    paths = list((folder / "results").rglob("summary.json"))
    assert paths
    for path in paths:
        summary, config = (
            json.loads((path.parent / name).read_text()) for name in ("summary.json", "config.json")
        )
        options = config["options"]
        if (options["method"], options["partition"]) == ("fedavg", "classes:1"):
            continue  # BN without a remedy does not learn from clients of one class
        chance = 1 / load_data(resolve(options).config.data).num_classes
        score = summary.get("accuracy-personal", summary[summary["metric"]])
        assert score > 1.5 * chance, path.parent.name
