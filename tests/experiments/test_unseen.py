"""A domain that nobody trains with: what is tested, what a model is adapted to, and what the table
says.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.metrics import jaccard_score

from fedbn_flwr import adapt, compare, run
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data import Data, Split
from fedbn_flwr.experiments.results.rows import rows
from fedbn_flwr.randomness import torch_generator
from tests.helpers.runs import OPTIONS

SMALL: dict[str, Any] = {
    key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "dataset"
}
SMALL |= {"model": "mlp", "partition": "domain", "clients": 2, "progress": False}
DOMAINS = ("dark", "grey", "light")


def drawn(of_each: int, seed: int) -> Split:
    """Return noise with a level for each domain, the same classes in each."""
    generator = torch.Generator().manual_seed(seed)
    domains = torch.arange(3).repeat(of_each)
    inputs = torch.randn(3 * of_each, 1, 8, 8, generator=generator) + domains.view(-1, 1, 1, 1)
    return Split(inputs, torch.randint(4, (3 * of_each,), generator=generator), domains)


def made() -> Data:
    return Data("levels", drawn(120, 0), drawn(40, 1), 4, DOMAINS, ("a", "b", "c", "d"))


def inputs_of(
    split: Split, domain: str, mean: tuple[float, ...] = (0.0,), std: tuple[float, ...] = (1.0,)
) -> Split:
    """Return the samples of a domain, normalized."""
    here = split.domains == DOMAINS.index(domain)
    return Split((split.inputs[here] - mean[0]) / std[0], split.labels[here])


@pytest.mark.filterwarnings("ignore:.* trained with frozen statistics")
@pytest.mark.parametrize("method", ["fedavg", "fedavg:trainable=head", "fedbn"])
def test_a_run_is_tested_on_the_domain_as_it_is_and_adapted(method: str, tmp_path: Path) -> None:
    data = made()
    found = run(method, data=data, unseen="light", folder=tmp_path, seed=3, **SMALL)
    (summary,) = found.summaries
    seen = data.train.inputs[data.train.domains != 2]
    mean, std = (float(seen.mean()),), (float(seen.std(correction=0)),)
    assert (summary["mean"], summary["std"]) == (
        pytest.approx(mean, rel=1e-5),
        pytest.approx(std, rel=1e-5),
    )
    unlabeled = inputs_of(data.train, "light").inputs
    unlabeled = unlabeled[torch.randperm(120, generator=torch_generator(3, "unlabeled"))]
    tested = inputs_of(data.test, "light", mean, std)
    for name, count in (("20", 20), ("100", 100), ("all", 120)):
        own = found.model(method, adapt=unlabeled[:count].split(50))
        assert not own.training
        assert summary[f"accuracy-adapted-{name}"] == evaluate(own, tested, 4, "cpu").accuracy
    if method != "fedbn":
        plain = found.model()
        assert summary["accuracy"] == evaluate(plain, tested, 4, "cpu").accuracy
        assert summary["domain-accuracy"] == {"light": summary["accuracy"]}
        by_hand = adapt(plain, unlabeled, preprocess=found.preprocess()).state_dict()
        torch.testing.assert_close(
            found.model(adapt=unlabeled).state_dict(), by_hand, rtol=0, atol=0
        )
        return
    # the nodes' models, and the mean of them: all that they share is the same
    models = [*found.models().values()]
    accuracies = [evaluate(model, tested, 4, "cpu").accuracy for model in models]
    assert summary["accuracy"] == pytest.approx(sum(accuracies) / 2)
    assert "domain-accuracy" not in summary
    own, states = found.model(adapt=unlabeled), [model.state_dict() for model in models]
    for name, value in own.state_dict().items():
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(value, (states[0][name] + states[1][name]) / 2)


def organs(count: int, seed: int) -> Split:
    """Return images with a class at each pixel, and a level for each domain."""
    generator = torch.Generator().manual_seed(seed)
    domains = torch.arange(3).repeat(count)
    classes = torch.randint(2, (3 * count, 8, 8), generator=generator)
    noise = torch.randn(3 * count, 1, 8, 8, generator=generator)
    inputs = classes[:, None] + noise + domains.view(-1, 1, 1, 1)
    return Split(inputs, classes.short(), domains)


def test_in_segmentation_a_model_is_adapted_and_tested_by_its_mean_iou(tmp_path: Path) -> None:
    data = Data("organs", organs(30, 0), organs(10, 1), 2, DOMAINS, (), "segmentation")
    options = {**SMALL, "model": "small-fcn"}
    found = run("fedbn", data=data, unseen="light", folder=tmp_path, seed=3, **options)
    (summary,) = found.summaries
    seen = data.train.inputs[data.train.domains != 2]
    tested = (data.test.inputs[data.test.domains == 2] - seen.mean()) / seen.std(correction=0)
    classes = data.test.labels[data.test.domains == 2].long()
    adapted = found.model(adapt=data.train.inputs[data.train.domains == 2])
    mean_bn, *_ = found.models().values()
    (weights,) = tmp_path.glob("*/model.safetensors")
    mean_bn.load_state_dict(load_file(weights))
    for name, model in (("adapted-all", adapted), ("mean-bn", mean_bn)):
        with torch.no_grad():
            predicted = model(tested).argmax(1)
        # the mean over classes of the Jaccard index
        score = jaccard_score(classes.flatten(), predicted.flatten(), average="macro")
        assert summary[f"mean-iou-{name}"] == pytest.approx(score, rel=1e-6)
        assert f"accuracy-{name}" not in summary


def test_a_model_that_trained_under_frozen_statistics_warns_of_others(
    recwarn: pytest.WarningsRecorder,
) -> None:
    methods = {
        "fedavg": "",
        "fixbn:freeze=affine": "affine",
        "fedavg:freeze-bn=true": "statistics",
        "fixbn": "statistics",
        "fedavg:trainable=head": "",
    }
    found = compare([*methods], data=made(), **{**SMALL, "clients": 3})
    assert [row.get("frozen", "") for row in found.summaries] == [*methods.values()]
    for path in found.folder.glob("*/model.safetensors"):
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
        summary = json.loads((path.parent / "summary.json").read_text())
        assert (about["class-names"], about.get("frozen")) == (
            ["a", "b", "c", "d"],
            summary.get("frozen"),
        )
    for method, frozen in methods.items():
        found.model(method, adapt=drawn(20, 2).inputs)
        warned = [
            str(each.message) for each in recwarn.list if "trained with frozen" in str(each.message)
        ]
        stood_still = frozen == "statistics" or "head" in method
        expected = [method] if stood_still else []
        assert [text.split(" ")[0] for text in warned] == expected
        recwarn.clear()
    without = run("fedwon", data=made(), **{**SMALL, "clients": 3})
    with pytest.raises(ValueError, match="the model has no BN layer"):
        without.model(adapt=drawn(20, 2).inputs)
    assert not [each for each in recwarn.list if "trained with frozen" in str(each.message)]


def test_each_domain_in_turn_is_a_run_that_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**SMALL, "data": made(), "folder": tmp_path, "unseen": "each"}
    found = compare(["fedavg", "fedwon"], **options)
    assert not found.failures
    assert [(row["strategy"], row["unseen"]) for row in found.summaries] == [
        (method, domain) for domain in DOMAINS for method in ("fedavg", "fedwon")
    ]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    again = compare(["fedavg", "fedwon"], reuse=True, **options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")} == written
    assert list(rows(tmp_path)["method"]) == [row["method"] for row in found.summaries]
    again.show()
    words = capsys.readouterr().out.split()
    assert [words.count(domain) for domain in (*DOMAINS, "mean")] == [1, 1, 1, 1]
    assert words.count("fedavg") == words.count("fedwon") == 4
    # of a method without a run on the last of them there is no mean
    partly = [f"{method}:unseen={domain}" for method in ("fedavg", "fedwon") for domain in DOMAINS][
        :-1
    ]
    compare(partly, reuse=True, **{**options, "unseen": ""}).show()
    words = capsys.readouterr().out.split()
    assert (words.count("fedavg"), words.count("fedwon")) == (4, 2)
    # a model without BN has nothing to adapt
    assert not [key for key in found.summaries[1] if "adapted" in key]
    single = compare(["fedavg"], **{**options, "unseen": "grey"})
    assert single.summaries[0]["accuracy"] == found.summaries[2]["accuracy"]


def test_values_are_chosen_without_the_domain(tmp_path: Path) -> None:
    """Held-out data are of the domains that take part, and no score of a choice is of adapted
    models.
    """
    compare(
        ["fedavg"],
        data=made(),
        unseen="grey",
        grid={"lr": [0.1, 0.2]},
        grid_seeds=1,
        folder=tmp_path,
        **SMALL,
    )
    tried = rows([path for path in (tmp_path / "grid").iterdir() if path.is_dir()])
    assert len(tried) == 2
    assert all(sorted(each) == ["dark", "light"] for each in tried["domain-accuracy"])
    assert not [column for column in tried.columns if "adapted" in column]
