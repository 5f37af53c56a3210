"""Runs on data that sites have in folders of their own, in process."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.run import Run
from safetensors.torch import load_file, save_file
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from apps.client import app
from fedbn_flwr import data, state
from fedbn_flwr.client.node_memory import STATE_VARIABLE
from fedbn_flwr.experiments import Config, UsageError, serve, server_side
from fedbn_flwr.experiments.client_side import at_site, client_fn
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.sites.agreement import Agreement, Answers, agree
from fedbn_flwr.experiments.sites.own_model import MODELS_VARIABLE, load_own_model
from fedbn_flwr.models import build
from fedbn_flwr.plugins.options import as_value
from fedbn_flwr.server.round import Round
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.wire.packed import is_packed, unpack
from tests.helpers.deaths import Death
from tests.helpers.runs import model_bytes
from tests.helpers.site_folders import CLASSES, SitesInProcess, images, write_images, write_sites

TRAIN, TEST = images(48, 1), images(24, 2)
OPTIONS: dict[str, Any] = {
    "clients": 0,
    "node-timeout": 20,
    "model": "small-cnn",
    "rounds": 2,
    "local-steps": 2,
    "batch-size": 4,
    "momentum": 0.5,
    "evaluate-every": 1,
    "device": "cpu",
    "seed": 3,
}
PARTITION = "dirichlet:0.5"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """All images in one folder, and in three by the clients of the partition."""
    return write_sites(tmp_path_factory.mktemp("sites"), PARTITION, 3, OPTIONS["seed"])


@pytest.fixture
def whole(folders: tuple[Path, list[Path]]) -> Path:
    return folders[0]


@pytest.fixture
def sites(folders: tuple[Path, list[Path]]) -> list[str]:
    return [f"folder:{folder}" for folder in folders[1]]


def options_for(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        **OPTIONS,
        "dataset": "sites",
        "classes": ",".join(CLASSES),
        "results-dir": str(folder),
        **options,
    }


def run_at_sites(
    folder: Path,
    sites: list[str],
    make_grid: type[SitesInProcess] = SitesInProcess,
    /,
    **options: Any,
) -> dict[str, Any]:
    """Run with data at the sites; returns the summary."""
    given = options_for(folder, **options)
    return serve(make_grid(sites, given), given)


def normalized_test_images(site: int, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The inputs and labels of a site's test images under the moments in a run's options."""
    mean, std = (
        torch.tensor([float(part) for part in options[key].split(",")]) for key in ("mean", "std")
    )
    chosen = slice(site * 8, site * 8 + 8)
    return (TEST.inputs[chosen] / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1), TEST.labels[
        chosen
    ]


@pytest.mark.parametrize("method", ["fedbn:mean-personal=false", "fedtan"])
def test_models_have_the_bits_of_runs_on_shared_data(
    method: str, whole: Path, sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MODELS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    run_at_sites(tmp_path / "sites", sites, method=method)
    # no models, for which the sites name no folder
    assert {path.name for path in tmp_path.iterdir()} == {"sites"}
    shared = {**OPTIONS, "dataset": f"folder:{whole}", "partition": PARTITION, "method": method}
    shared["results-dir"] = str(tmp_path / "shared")
    serve(InProcessGrid(app, 3, shared), shared)
    assert model_bytes(tmp_path / "sites") == model_bytes(tmp_path / "shared")
    losses = [
        [row["train-loss"] for row in read_rounds(tmp_path / name)] for name in ("sites", "shared")
    ]
    assert losses[0] == losses[1]


def test_sites_score_the_model_on_their_own_test_data(sites: list[str], tmp_path: Path) -> None:
    summary = run_at_sites(tmp_path, sites, **{"class-metrics": "f1,auc"})
    options = json.loads((tmp_path / "config.json").read_text())["options"]
    mean, std = (
        torch.tensor([float(part) for part in options[key].split(",")]) for key in ("mean", "std")
    )
    # pooled of all sites: of all training images
    everything = TRAIN.inputs.double() / 255
    assert torch.allclose(mean.double(), everything.mean((0, 2, 3)), atol=1e-7)
    assert torch.allclose(std.double(), everything.std((0, 2, 3), correction=0), atol=1e-7)
    model = build("small-cnn", num_classes=3, in_channels=3, image_size=8, seed=0)
    state.load(model, load_file(tmp_path / "model.safetensors"))
    model.eval()
    scores = []
    for site in range(3):
        inputs, labels = normalized_test_images(site, options)
        with torch.no_grad():
            shares = model(inputs).softmax(1)
        row = summary["sites"][str(site)]
        assert row["accuracy"] == float((shares.argmax(1) == labels).double().mean())
        f1 = f1_score(labels, shares.argmax(1), average=None, labels=[0, 1, 2], zero_division=0)
        auc = [roc_auc_score(labels == number, shares[:, number]) for number in range(3)]
        assert row["f1"] == pytest.approx(dict(zip(CLASSES, f1, strict=True)), abs=1e-6)
        assert row["auc"] == pytest.approx(dict(zip(CLASSES, auc, strict=True)), abs=1e-6)
        scores.append(row)
    assert summary["accuracy"] == pytest.approx(sum(row["accuracy"] for row in scores) / 3)
    for name in CLASSES:
        assert summary["class-f1"][name] == pytest.approx(
            sum(row["f1"][name] for row in scores) / 3
        )


def saying(kind: str, key: str, value: Any) -> type[SitesInProcess]:
    """Return a grid in which the second site's replies to messages of a kind have this metric."""

    class Saying(SitesInProcess):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if (reply.metadata.message_type, reply.metadata.src_node_id) == (kind, 1001):
                    reply.content.metric_records["metrics"][key] = value
            return replies

    return Saying


IMPOSSIBLE = [
    ("accuracy", 1000.0),
    ("accuracy", math.inf),
    ("accuracy", math.nan),
    ("class-f1", 1e30),
]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_an_impossible_score_of_a_site_stops_no_run(
    key: str, value: float, sites: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = value if key == "accuracy" else [math.nan, 1.0, value]
    more = {"stop-at": 0.999, "class-metrics": "f1"}
    summary = run_at_sites(tmp_path, sites, saying("evaluate", key, said), **more)
    assert (len(read_rounds(tmp_path)), list(summary["sites"])) == (2, ["0", "2"])
    assert summary["accuracy"] == pytest.approx(
        (summary["sites"]["0"]["accuracy"] + summary["sites"]["2"]["accuracy"]) / 2
    )
    assert f"Node 1001 is left out of the scores: its {key!r} is {value}" in caplog.messages


def test_the_order_of_classes_decides_their_numbers(sites: list[str], tmp_path: Path) -> None:
    run_at_sites(tmp_path / "one", sites, classes="covid,normal,pneumonia")
    run_at_sites(tmp_path / "other", sites, classes="pneumonia,covid,normal")
    tables = [
        json.loads((tmp_path / name / "config.json").read_text())["sites"]
        for name in ("one", "other")
    ]
    assert tables[0] == tables[1]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    last = [name for name in one if name.endswith("bias")][-1]
    assert not torch.equal(one[last], other[last])


def test_a_class_may_be_missing_at_a_site(sites: list[str], tmp_path: Path) -> None:
    lacking = tmp_path / "lacking"
    normal = [number for number in range(24) if TRAIN.labels[number] == 1]
    write_images(TRAIN, lacking / "train", [*normal, 0, 3, 6])
    write_images(TEST, lacking / "test", [1, 4, 0])
    options = {"class-metrics": "f1,auc", "classes": "normal,other,pneumonia,covid"}
    summary = run_at_sites(tmp_path / "results", [sites[0], f"folder:{lacking}"], **options)
    assert set(summary["sites"]["1"]["f1"]) == {"normal", "covid"}
    # a class that no site has
    assert set(summary["class-f1"]) == {"normal", "pneumonia", "covid"}
    assert not any(math.isnan(value) for value in summary["class-auc"].values())


def test_personal_entries_stay_at_the_sites(sites: list[str], tmp_path: Path) -> None:
    sent: set[str] = set()

    class Watched(SitesInProcess):
        def _answer(self, message: Any) -> Any:
            reply = super()._answer(message)
            content = unpack(reply.content) if is_packed(reply.content) else reply.content
            for record in content.array_records.values():
                sent.update(record)
            return reply

    run_at_sites(tmp_path, sites, Watched, method="fedbn")
    model = build("small-cnn", num_classes=3, in_channels=3, image_size=8, seed=0)
    assert sent == set(model.state_dict()) - state.group_keys(model, "bn")


def test_a_run_goes_on_with_what_the_sites_agreed_on(
    sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"method": "fedbn", "momentum-state": "local", "rounds": 3, "checkpoint-every": 2}
    given = options_for(tmp_path / "run", **options)
    record = Journal.record

    def die(journal: Journal, now: Round, score: Any) -> None:
        if now.number == 3:
            raise Death
        record(journal, now, score)

    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "whole-states"))
    for _ in range(2):
        done = run_at_sites(tmp_path / "whole", sites, **options)
    # with the time of the first
    assert done == json.loads((tmp_path / "whole" / "summary.json").read_text())
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "run-states"))
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "record", die)
        with pytest.raises(Death):
            serve(SitesInProcess(sites, given), given)
    agreed = json.loads((tmp_path / "run" / "config.json").read_text())["options"]
    later = SitesInProcess(sites, given)
    later.set_run(Run.create_empty(run_id=2))
    seen: list[Config] = []

    def noting(config: Config, answers: Answers) -> Agreement:
        seen.append(config)
        return agree(config, answers)

    monkeypatch.setattr(server_side, "agree", noting)
    serve(later, {**given, "resume": str(tmp_path / "run")})
    assert [(as_value(config.data.mean), as_value(config.data.std)) for config in seen] == [
        (agreed["mean"], agreed["std"])
    ]
    assert model_bytes(tmp_path / "whole") == model_bytes(tmp_path / "run")


def test_a_run_on_shared_data_is_refused_by_a_site_with_its_own(
    sites: list[str], tmp_path: Path
) -> None:
    options = {**OPTIONS, "dataset": "digits", "partition": "iid", "results-dir": str(tmp_path)}
    refused = "this site trains on its own data only: the run must have dataset='sites'"
    with pytest.raises(RuntimeError, match=refused):
        serve(SitesInProcess(sites, options), options)
    # the site reads and calls nothing of the run to find out how its data are split
    place: dict[str, Any] = {"partition-id": 0, "num-partitions": 1, "data": sites[0]}
    context = Context(0, 0, place, RecordDict(), {})
    context.run_config = {**options, "dataset": "no_such_module:images", "partition": ""}
    with pytest.raises(UsageError, match=refused):
        client_fn(context)


# ---- the models of the sites, in files -----------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "stays"), [("fedavg", "none"), ("fedbn", "bn"), ("silobn", "statistics")]
)
def test_the_file_has_the_model_that_the_site_has_scored(
    method: str, stays: str, sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    summary = run_at_sites(tmp_path / "results", sites, method=method)
    shared = load_file(tmp_path / "results" / "model.safetensors")
    for site in range(3):
        own = load_own_model(tmp_path / "models" / "1" / f"{site}.safetensors")
        assert own.about == {"run": "1", "round": 2, "site": str(site), "shape": [3, 8, 8]}
        personal = state.group_keys(own.model, stays)
        entries = own.model.state_dict()
        assert all(torch.equal(entries[name], shared[name]) for name in entries.keys() - personal)
        # counters of a site that has taken as many steps as the others are the same
        learned = [name for name in personal if not name.endswith("num_batches_tracked")]
        assert not any(torch.equal(entries[name], shared[name]) for name in learned)
        inputs, labels = normalized_test_images(site, own.options)
        with torch.no_grad():
            right = own.model(inputs).argmax(1) == labels
        assert float(right.double().mean()) == summary["sites"][str(site)]["accuracy"]


def test_a_file_without_a_sites_model_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(9)}, tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes()[:-1])
    for name in ("other.safetensors", "cut.safetensors", "absent.safetensors"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} is no file of export_model: "):
            load_own_model(tmp_path / name)


def test_a_node_reads_no_weights_because_the_server_sends_them() -> None:
    assert at_site(Config().but(init_from="/weights.pt"), "").model.init_from == ""


def test_a_site_opens_no_file_that_a_run_names(sites: list[str]) -> None:
    at = at_site(
        Config().but(
            dataset="sites", init_from="/weights.pt", data_root="/data", classes=("a", "b")
        ),
        sites[0],
    )
    assert (at.model.init_from, at.data.data_root, at.data.dataset, at.data.partition) == (
        "",
        "",
        sites[0],
        "union",
    )


# ---- mistakes ------------------------------------------------------------------------------------


def two_outputs(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def of_another_size(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28 * in_channels, num_classes))


def still_lazy(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


HERE = __name__
REFUSED = [
    (
        {"classes": "covid,normal"},
        r"node \d+: class 'pneumonia' is not one of the run's classes: covid, normal",
    ),
    (
        {"classes": ""},
        "needs classes, in the order of their numbers; there are: covid,normal,pneumonia",
    ),
    (
        {"method": "centralized:clients=3"},
        "method 'centralized:clients=3' needs all data in one place",
    ),
    ({"mean": "0.5", "std": "0.5"}, "the sites' data: mean has 1 numbers for 3 channels"),
    ({"model": f"{HERE}:two_outputs"}, "two_outputs' has 2 outputs for 3 classes"),
    (
        {"model": f"{HERE}:of_another_size"},
        r"of_another_size' cannot take inputs of the shape \(3, 8, 8\)",
    ),
    ({"model": f"{HERE}:still_lazy"}, "still_lazy' has lazy layers"),
    (
        {"model": "mlp", "norm": "none", "method": "fixbn"},
        "method 'fixbn' would be another one: the model has no BN layer",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_cannot_be_ends_the_run_before_round_1(
    options: dict[str, Any], reason: str, sites: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=reason):
        run_at_sites(tmp_path / "results", sites, **options)
    assert not (tmp_path / "results").exists()


def test_weights_of_another_model_are_refused(sites: list[str], tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"other\.safetensors"):
        run_at_sites(
            tmp_path / "results", sites, **{"init-from": str(tmp_path / "other.safetensors")}
        )


def test_a_class_that_no_site_has_is_told(
    sites: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = run_at_sites(tmp_path, sites, classes=",".join(["flu", *CLASSES]))
    told = "no client has samples of some classes: flu (sites with 3 clients)"
    assert told in caplog.messages
    assert summary["absent-classes"] == ["flu"]


BAD_DATA = [
    ("", 'this site has no data: its SuperNode needs data="folder:/PATH" in --node-config'),
    (
        "folder:images",
        "the site's data must be an absolute path, as in folder:/data, not 'folder:images'",
    ),
    (
        "folder:/nowhere/at/all",
        "must be in train/CLASS/ and test/CLASS/, and there is no /nowhere/at/all/train",
    ),
    ("digits", "the site's data 'digits' have no class names"),
    ("streets", "model 'small-cnn' is for classification, streets for segmentation; there are"),
    ("no.such.module:function", "data set 'no.such.module:function': cannot import"),
]


@pytest.mark.parametrize(("spec", "reason"), BAD_DATA)
def test_data_are_checked_at_the_site(
    spec: str, reason: str, sites: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="node 1001: ") as error:
        run_at_sites(tmp_path / "results", [sites[0], spec])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_of_other_names_are_no_domains(sites: list[str], tmp_path: Path) -> None:
    """Here `Train/CLASS/` and `Test/CLASS/`: a test image must not become one to train on."""
    for role in ("train", "test"):
        shutil.copytree(
            Path(sites[1].removeprefix("folder:")) / role, tmp_path / "data" / role.title()
        )
    with pytest.raises(
        UsageError, match=r"must be in train/CLASS/ and test/CLASS/, and there is no .*/data/train"
    ):
        run_at_sites(tmp_path / "results", [sites[0], f"folder:{tmp_path / 'data'}"])


def test_images_of_another_size_are_refused_or_made_equal(sites: list[str], tmp_path: Path) -> None:
    large = tmp_path / "large"
    for role, split in (("train", TRAIN), ("test", TEST)):
        write_images(
            data.Split(split.inputs[:9].repeat(1, 1, 2, 2), split.labels[:9]),
            large / role,
            range(9),
        )
    both = [sites[0], f"folder:{large}"]
    with pytest.raises(UsageError, match=r"node 1001: its images are 3x16x16, but 3x8x8 at"):
        run_at_sites(tmp_path / "refused", both)
    run_at_sites(tmp_path / "equal", both, **{"image-size": 8})
    fewer = run_at_sites(
        tmp_path / "fewer", [*sites[:2], both[1]], **{"min-nodes": 1, "rounds": 2, "clients": 3}
    )
    assert (fewer["left-out"], sorted(fewer["sites"])) == ({1002: 2}, ["0", "1"])
