"""The schema of recipes: what a file may hold, one line for each mistake, and the papers'
recipes.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.experiments import UsageError, main
from fedbn_flwr.experiments.checks import checked_material
from fedbn_flwr.experiments.material import load_data, rounds_within_budget
from fedbn_flwr.experiments.recipes.schema import read_recipe, recipe_names

#: a recipe with everything
WHOLE: dict[str, Any] = {
    "place": "Table 9, page 3",
    "about": "three methods",
    "options": {"dataset": "digits", "rounds": 30, "lr": 0.05},
    "methods": {"BN": "fedavg", "GN": "fedavg+gn", "TAN": "fedtan:exchange=paper"},
    "vary": {
        "partition": {"IID": "iid", "Shards": {"partition": "classes:2", "lr": 0.1}},
        "local-steps": [1, 20],
    },
    "leave-out": [{"methods": ["TAN"], "in": ["IID", "local-steps=20"]}],
    "seeds": 3,
    "grid": {"lr": [0.01, 0.1]},
    "reported": [
        {"place": "Table 9", "values": {"BN": {"IID, local-steps=1": "45.90 ± 6.39"}, "GN": {}}}
    ],
    "directions": [
        {"claim": "GN > BN", "in": "Shards", "place": "page 2"},
        {"claim": "BN @ local-steps=20 > BN @ local-steps=1"},
    ],
    "notes": ["a note"],
    "smoke": {
        "options": {"rounds": 20},
        "methods": {"TAN": "fedtan"},
        "vary": {"local-steps": {"local-steps=20": {"local-steps": 4, "rounds": 25}}},
        "seeds": 2,
    },
}


def write(folder: Path, content: object) -> str:
    path = folder / "mine.yaml"
    text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    path.write_text(text, errors="surrogateescape")
    return str(path)


def test_a_setting_has_the_options_of_its_labels(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, WHOLE))
    assert [setting.name for setting in recipe.study.settings] == [
        "IID, local-steps=1",
        "IID, local-steps=20",
        "Shards, local-steps=1",
        "Shards, local-steps=20",
    ]
    last = recipe.study.experiment(recipe.study.settings[3], "GN", 2).config
    assert (last.data.partition, last.training.lr, last.training.local_steps, last.rounds) == (
        "classes:2",
        0.1,
        20,
        30,
    )
    assert (last.model.norm, last.seed) == ("gn", 2)
    # 4 settings x 3 methods, less the one that is left out
    assert len(recipe.study.cells()) == 11
    assert (recipe.study.seeds, recipe.study.grid) == (3, {"lr": [0.01, 0.1]})


def test_in_small_the_cells_are_the_same(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, WHOLE))
    small = recipe.in_small()
    names = [(setting.name, method) for setting, method in recipe.study.cells()]
    assert [(setting.name, method) for setting, method in small.study.cells()] == names
    changed = small.study.experiment(small.study.settings[3], "TAN", 0).config
    # what the label stands for in small wins over everything; what smoke does not name stays
    assert (changed.training.local_steps, changed.rounds, changed.training.lr, changed.method) == (
        4,
        25,
        0.1,
        "fedtan",
    )
    other = small.study.experiment(small.study.settings[2], "BN", 0).config
    assert (other.training.local_steps, other.rounds) == (1, 20)
    assert (small.study.seeds, small.study.grid) == (2, {})
    assert small.paper.notes[-1].startswith(
        "Run in small, with rounds 20; local-steps=20: local-steps 4, rounds 25; TAN: fedtan."
    )


def test_only_some_labels(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, WHOLE))
    part = recipe.only(["GN", "BN", "Shards"])
    assert [(setting.name, method) for setting, method in part.study.cells()] == [
        ("Shards, local-steps=1", "BN"),
        ("Shards, local-steps=1", "GN"),
        ("Shards, local-steps=20", "BN"),
        ("Shards, local-steps=20", "GN"),
    ]
    with pytest.raises(
        UsageError, match=r"has no 'LN'; it has: BN, GN, TAN, IID, Shards, local-steps=1, "
    ):
        recipe.only(["LN"])


def test_labels_that_yaml_reads_as_numbers_are_labels(tmp_path: Path) -> None:
    """Of methods and settings, and where a paper's numbers name them."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "methods: {1: fedavg, 2: fedbn}\nvary: {clients: {5: {clients: 5}, 10: {clients: 10}}}\n"
        "reported:\n  - place: table 1\n    values: {1: {5: 40.1, 10: 50.2}}\n"
    )
    recipe = read_recipe(str(file))
    (reported,) = recipe.paper.reported
    assert list(reported.values) == [("1", "5", ""), ("1", "10", "")]


def test_keys_of_another_mapping_may_be_merged_and_changed(tmp_path: Path) -> None:
    text = (
        "methods: [fedavg]\nvary:\n  size:\n    few: &few {lr: 0.1, rounds: 3}\n    many: {<<: "
        "*few, rounds: 9}\n"
    )
    options = [setting.options for setting in read_recipe(write(tmp_path, text)).study.settings]
    assert options == [{"lr": 0.1, "rounds": 3}, {"lr": 0.1, "rounds": 9}]


MISTAKES: dict[str, tuple[object, str]] = {
    "no mapping": ([1, 2], "recipe mine: must be a mapping of place, about, "),
    "no YAML": ("{", "is not YAML"),
    "no text": ("\udcff", "is not YAML"),
    "a key twice": (
        "methods: [fedavg]\noptions:\n  lr: 0.1\n  rounds: 9\n  lr: 0.3\n",
        "recipe mine: is not YAML: line 5 has the key 'lr' a second time",
    ),
    "a label twice in a line": (
        "methods: {1: fedavg, '1': fedbn}\n",
        "line 1 has the key '1' a second time",
    ),
    "unknown key": ({**WHOLE, "rates": [1]}, "recipe mine: unknown key 'rates'; known: place, "),
    "no methods": ({}, "methods must be a list, or a mapping of labels"),
    "unknown strategy": (
        {"methods": ["fedsgd"]},
        "methods: fedsgd: unknown strategy 'fedsgd'; known: fedavg, ",
    ),
    "unknown option": (
        {"methods": ["fedavg"], "options": {"lrate": 1}},
        "options: unknown option 'lrate'; like it: latest; all: ",
    ),
    "an option that is no text": (
        "methods: [fedavg]\noptions: {2020-01-01: 1}\n",
        "options: unknown option '2020-01-01'; all: ",
    ),
    "an axis that YAML reads as a truth value": (
        "methods: [fedavg]\nvary: {no: [1, 2]}\n",
        "vary: False: False=1: unknown option 'False'; ",
    ),
    "no option": (
        {"methods": ["fedavg"], "options": {"resume": "x"}},
        "options: 'resume' is no option of a recipe",
    ),
    "two values": (
        {"methods": ["fedavg"], "options": {"lr": [1, 2]}},
        "options: lr must be one value, got [1, 2]",
    ),
    "bad value": (
        {"methods": ["fedavg"], "options": {"lr": "fast"}},
        "recipe mine: lr must be a number, got 'fast'",
    ),
    "axis without values": (
        {"methods": ["fedavg"], "vary": {"lr": []}},
        "vary: lr must be a list of values",
    ),
    "no option of the axis": (
        {"methods": ["fedavg"], "vary": {"E": [1]}},
        "vary: E: E=1: unknown option 'E'",
    ),
    "a label twice": (
        {"methods": {"a": "fedavg"}, "vary": {"lr": {"a": 1}}},
        "label 'a' stands for two things",
    ),
    "nothing left": (
        {"methods": ["fedavg"], "leave-out": [{"methods": "fedavg"}]},
        "leave-out leaves no cell",
    ),
    "no seeds": ({"methods": ["fedavg"], "seeds": 0}, "seeds must be at least 1, got 0"),
    "an option of two axes": (
        {
            "methods": ["fedavg"],
            "vary": {"lr": [0.1, 0.3], "data": {"few": {"lr": 1, "batch-size": 8}}},
        },
        "vary: data: lr is set by the axis 'lr' already",
    ),
    "an option of an axis and of a method": (
        {"methods": {"A": "fedavg:lr=1"}, "vary": {"lr": [0.1, 0.3]}},
        "methods: A: lr is set by the axis 'lr' already",
    ),
    "a normalizer of an axis and of a method": (
        {"methods": ["fedavg+gn"], "vary": {"norm": ["bn", "ln"]}},
        "methods: fedavg+gn: norm is set by the axis 'norm' already",
    ),
    "an option of an axis and of the grid": (
        {"methods": ["fedavg"], "vary": {"lr": [0.1, 0.3]}, "grid": {"lr": [0.1, 0.3]}},
        "grid: lr is an axis, whose labels say its values",
    ),
    "a grid of nothing": (
        {"methods": ["fedavg"], "grid": {"lr": []}},
        "grid: lr must have at least one value",
    ),
    "bad value of a grid": (
        {"methods": ["fedavg"], "grid": {"lr": [0.1, "fast"]}},
        "grid: lr must be a number, got 'fas",
    ),
    "no grid": (
        {"methods": ["fedavg"], "grid": [1]},
        "grid must be a mapping of options to lists of values, got [1]",
    ),
    "unknown quantity": (
        {"methods": ["fedavg"], "quantities": ["f1"]},
        "quantities: unknown 'f1'; known: score, accuracy",
    ),
    "no place": (
        {"methods": ["fedavg"], "reported": [{"values": {}}]},
        "reported 1: place is missing",
    ),
    "no number": (
        {"methods": ["fedavg"], "reported": [{"place": "p", "values": {"fedavg": "high"}}]},
        "values: fedavg must be a number, or a text like '45.90 ± 6.39', got 'high'",
    ),
    "number of another method": (
        {"methods": ["fedavg"], "reported": [{"place": "p", "values": {"BN": 1}}]},
        "values: unknown method 'BN'; the recipe has: fedavg",
    ),
    "number of another setting": (
        {
            "methods": ["fedavg"],
            "vary": {"lr": [1]},
            "reported": [{"place": "p", "values": {"fedavg": {"lr=2": 1}}}],
        },
        "values: fedavg: unknown setting 'lr=2'; the recipe has: lr=1",
    ),
    "no claim": (
        {"methods": ["fedavg"], "directions": [{"claim": "good"}]},
        "directions 1: claim: unknown method",
    ),
    "claim of another label": (
        {"methods": ["fedavg"], "directions": [{"claim": "fedavg @ IID > fedavg"}]},
        "claim: unknown label 'IID'; the recipe has: none",
    ),
    "another axis in small": (
        {"methods": ["fedavg"], "smoke": {"vary": {"lr": [1]}}},
        "smoke: vary: unknown axis 'lr'; the recipe has: none",
    ),
    "another label in small": (
        {**WHOLE, "smoke": {"vary": {"partition": {"Dirichlet": "iid"}}}},
        "smoke: vary: partition: unknown label 'Dirichlet'; the recipe has: IID, Shards",
    ),
    "another method in small": (
        {**WHOLE, "smoke": {"methods": {"LN": "fedavg+ln"}}},
        "methods: unknown label 'LN'",
    ),
}


@pytest.mark.parametrize(("content", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(
    content: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", write(tmp_path, content), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedbn-flwr: recipe mine: ")
    assert reason in line


def test_a_recipe_without_a_small_form_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", write(tmp_path, {"methods": ["fedavg"]}), "--smoke"]) == 2
    assert "recipe mine has no smoke" in capsys.readouterr().err


# ---- the papers' recipes -------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.sampled(3)
def test_every_cell_of_a_recipe_resolves(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name)
    for form in (recipe, recipe.in_small()):
        assert form.study.runs(tmp_path)
    assert recipe.paper.place
    assert recipe.paper.about
    assert recipe.paper.reported or recipe.paper.directions


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.sampled(1)
def test_every_recipe_runs_in_small_for_20_rounds_at_least(name: str) -> None:
    """On embedded data: the cells are checked up to the first round."""
    small = read_recipe(name).in_small()
    for setting, method in small.study.cells():
        config = small.study.experiment(setting, method, 0).config
        assert str(config.data.dataset).partition(":")[0] in (
            "digits",
            "digits-domains",
            "streets",
            "synthetic",
        )
        assert (
            rounds_within_budget(config, config.clients, len(load_data(config.data).train)).rounds
            >= 20
        )
    for setting in small.study.settings:
        experiment = small.study.experiment(setting, small.study.methods_of(setting)[0], 0)
        checked_material(experiment, experiment.make_strategy(experiment.config.clients))


def test_recipes_are_listed_by_paper_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    words = capsys.readouterr().out.split()
    assert [word for word in words if word in recipe_names()] == recipe_names()
