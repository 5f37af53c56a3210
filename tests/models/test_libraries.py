"""Networks of timm and torchvision at the command: their images and weights, what of them learns,
and their BN.
"""

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.models import build
from fedbn_flwr.models.weights import load_weights
from fedbn_flwr.norm import bn_layers
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.simulation.how_trained import APART
from fedbn_flwr.strategies import prepare
from tests.helpers.layerwise_references import heterogeneous_batches, made
from tests.helpers.runs import rounds, run, run_in
from tests.layerwise.test_shared_statistics import assert_centralized

timm = pytest.importorskip("timm", reason="the extra timm is not installed")

#: timm's own small network for tests; BN with an activation behind it
NETWORK, SMALL = "timm:test_efficientnet", {"image_size": "32", "rounds": "1", "local_steps": "1"}


def options_of_run(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((run_in(folder) / "config.json").read_text())["options"]
    return options


def weights_of_run(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(run_in(folder) / "model.safetensors")


def save_network(path: Path, num_classes: int = 9, model: str = NETWORK) -> dict[str, torch.Tensor]:
    state = build(model, num_classes=num_classes, image_size=32, seed=5).state_dict()
    state = {
        name: value + 0.1 if name.endswith("running_mean") else value
        for name, value in state.items()
    }
    save_file(state, path)
    return state


# ---- images --------------------------------------------------------------------------------------


def test_images_are_those_that_the_network_was_trained_with_unless_options_say_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        run("run", model=NETWORK, rounds="1", local_steps="1", results_dir=str(tmp_path / "usual"))
        == 0
    )
    text = (
        f"{NETWORK}: images have 160x160 pixels, as it was trained with; image-size=64 takes 6 "
        "times less"
    )
    assert caplog.messages.count(text) == 1
    options, about = (
        options_of_run(tmp_path / "usual"),
        timm.models.get_pretrained_cfg("test_efficientnet"),
    )
    # of images of one channel with 8x8 pixels
    assert (options["image-size"], options["channels"]) == (
        160,
        3,
    )
    assert options["mean"] == ",".join(map(str, about.mean))
    given = {**SMALL, "mean": "0.4", "std": "0.2", "channels": "1"}
    assert run("run", model=NETWORK, results_dir=str(tmp_path / "given"), **given) == 0
    assert caplog.messages.count(text) == 1
    options = options_of_run(tmp_path / "given")
    assert [options[key] for key in ("image-size", "channels", "mean", "std")] == [
        32,
        1,
        "0.4",
        "0.2",
    ]


def test_a_transformer_is_made_for_the_size() -> None:
    assert build("timm:test_vit3", image_size=64)(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_torchvisions(tmp_path: Path) -> None:
    given = {**SMALL, "image_size": "64", "model": "torchvision:squeezenet1_1"}
    assert run("run", results_dir=str(tmp_path), **given) == 0
    assert options_of_run(tmp_path)["mean"] == "0.485,0.456,0.406"


# ---- methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network", [NETWORK, pytest.param("timm:test_resnet", marks=pytest.mark.slow)]
)
def test_methods_of_bn_and_stacks(
    network: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    methods = "fedavg", "fixbn:freeze-round=0", "fedtan", "fedtan:carry=true"
    for engine in ("stacked", "inprocess"):
        words, chunk = (
            ("compare", "--methods", ",".join(methods), "--engine", engine),
            "2" * (engine == "stacked"),
        )
        assert (
            run(
                *words,
                model=network,
                chunk=chunk or "0",
                results_dir=str(tmp_path / engine),
                **SMALL,
            )
            == 0
        )
    assert APART not in caplog.text
    for method in methods:
        name = method.replace(":", "_")
        (stacked,), (alone,) = (
            [*(tmp_path / engine).glob(f"{name}-seed*")] for engine in ("stacked", "inprocess")
        )
        found, wanted = weights_of_run(stacked), weights_of_run(alone)
        assert all(torch.allclose(found[key], wanted[key], rtol=1e-3, atol=1e-4) for key in wanted)


def test_a_network_without_bn_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convnext: dict[str, Any] = {
        **SMALL,
        "model": "timm:test_convnext",
        "results_dir": str(tmp_path),
    }
    assert run("run", **convnext) == 0
    for method in ("fixbn", "fedtan", "fedavg:freeze-bn=true"):
        capfd.readouterr()
        assert run("run", method=method, **convnext) == 2
        assert (
            f"method '{method}' would be another one: the model has no BN layer"
            in capfd.readouterr().err
        )


@pytest.mark.parametrize(
    "name",
    [
        "timm:test_efficientnet",
        "timm:test_resnet",
        *(
            pytest.param(f"timm:{name}", marks=pytest.mark.slow)
            for name in ("resnet18", "mobilenetv3_small_050")
        ),
    ],
)
@pytest.mark.sampled(1)
def test_fedtans_gradients_are_the_centralized_ones(name: str) -> None:
    batches = heterogeneous_batches([3, 1, 4], (3, 32, 32))
    assert_centralized(made(lambda: build(name, image_size=32)), batches, buffers=1e-8)


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["safetensors", "state_dict", "model", "module.", "module._orig_mod.", "model."]
)
@pytest.mark.sampled(2)
def test_a_file_with_another_head_is_loaded_but_for_the_head(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pth")
    state = save_network(path)
    if form.endswith("."):
        torch.save(
            {"epoch": 3, "state_dict": {f"{form}{name}": value for name, value in state.items()}},
            path,
        )
    elif form != "safetensors":
        torch.save({form: state, "args": Namespace(epochs=3)}, path)
    given = {**SMALL, "lr": "0", "method": "fedavg:freeze-bn=true"}
    assert (
        run("run", model=NETWORK, init_from=str(path), results_dir=str(tmp_path / "run"), **given)
        == 0
    )
    after = weights_of_run(tmp_path / "run")
    head = {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(after[name], state[name]) for name in state.keys() - head)
    assert (
        f"{path} has another number of classes: classifier.weight, classifier.bias start at random"
        in caplog.text
    )
    # as torch's own linear layers, of 256 inputs
    assert after["classifier.weight"].shape == (4, 256)
    assert 0.5 < after["classifier.weight"].abs().max() * math.sqrt(256) <= 1


def test_a_head_of_a_users_own_starts_as_the_user_made_it(caplog: pytest.LogCaptureFixture) -> None:
    class Head(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((classes, 2), float(classes)))

    model = nn.Sequential(nn.Linear(2, 2), Head(3))
    state = nn.Sequential(nn.Linear(2, 2), Head(5)).state_dict()
    load_weights(model, state, "five.pth", 3)
    assert model.state_dict()["1.scale"].unique().tolist() == [3.0]
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"])
    assert "five.pth has another number of classes: 1.scale start at random" in caplog.text


def test_published_weights_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    small = {**SMALL, "init_from": "pretrained", "results_dir": str(tmp_path)}
    assert run("run", model=NETWORK, **small) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert (
        "its weights are not in ~/.cache/huggingface, and cannot be downloaded: give model.safe"
        in line
    )
    assert (
        "give model.safetensors of huggingface.co/timm/test_efficientnet.r160_in1k as "
        "init-from=FILE" in line
    )
    assert run("run", **small) == 2
    assert (
        "init-from=pretrained is for models such as timm:resnet18 or torchvision:resnet18, not "
        "small-cnn" in capfd.readouterr().err
    )


def test_published_weights_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = save_network(tmp_path / "cached.safetensors", num_classes=1000)
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(state)
    )
    model = build(NETWORK, num_classes=4, image_size=32, init_from="pretrained")
    after = model.state_dict()
    head = {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(after[name], state[name]) for name in state.keys() - head)
    assert after["classifier.weight"].shape == (4, 256)


def test_a_file_that_fits_no_layer_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_network(tmp_path / "other.safetensors", model="timm:test_resnet")
    given = {
        **SMALL,
        "init_from": str(tmp_path / "other.safetensors"),
        "results_dir": str(tmp_path / "run"),
    }
    assert run("run", model=NETWORK, **given) == 2
    assert "other.safetensors does not fit the model: " in capfd.readouterr().err


@pytest.mark.parametrize("norm", ["gn", "bn-ws", "none"])
def test_substitutes_say_what_they_throw_away(
    norm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights.safetensors"
    state = save_network(path, num_classes=4)
    model = build(NETWORK, num_classes=4, image_size=32, norm=norm, init_from=path)
    after = model.state_dict()
    lost = [
        name for name in state if name not in after or not torch.equal(after[name], state[name])
    ]
    said = (
        f"the normalizer '{norm}' drops or changes {len(lost)} of {len(state)} entries of the "
        "weights, such as"
    )
    assert [said in message for message in caplog.messages] == [True]
    caplog.clear()
    assert build(NETWORK, num_classes=4, image_size=32, init_from=path)
    assert not caplog.messages
    # so does a network that was trained, wherever it comes from
    warn_once.cache_clear()
    assert prepare(build(NETWORK, num_classes=4, image_size=32, init_from=path), f"fedavg+{norm}")
    assert [said in message for message in caplog.messages] == [True]
    # what was trained with the substitute is loaded as it is
    save_file({name: value.contiguous() for name, value in after.items()}, path)
    again = build(
        NETWORK, num_classes=4, image_size=32, norm=norm, init_from=path, seed=3
    ).state_dict()
    assert all(torch.allclose(again[name], after[name], rtol=1e-6) for name in after)


# ---- what learns ---------------------------------------------------------------------------------

#: of timm's test network: the parameters that learn under the option, by their beginnings
CHOSEN = {
    "head": ("classifier.",),
    "classifier.*,conv_head.*": ("classifier.", "conv_head."),
    "!blocks.*,!conv_stem.*": ("bn1.", "conv_head.", "bn2.", "classifier."),
    "bn2.*,!*.bias": ("bn2.weight",),
    "head=2,bn1.*=0,bn1.*=0.1,!conv*,!blocks.*": ("bn2.", "classifier."),
}


@pytest.mark.parametrize("engine", ["stacked", pytest.param("inprocess", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.sampled(2)
def test_only_the_chosen_parameters_learn(
    chosen: str, engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights.safetensors"
    before = save_network(path, num_classes=4)
    given = {**SMALL, "trainable": chosen, "engine": engine, "init_from": str(path)}
    assert run("run", model=NETWORK, results_dir=str(tmp_path / "run"), **given) == 0
    after = weights_of_run(tmp_path / "run")
    model = build(NETWORK, num_classes=4, image_size=32)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed & dict(model.named_parameters()).keys() == {
        name for name, _ in model.named_parameters() if name.startswith(CHOSEN[chosen])
    }
    # the statistics of those BN layers move that have a parameter that learns
    moving = {
        layer
        for layer in bn_layers(model)
        if f"{layer}.".startswith(CHOSEN[chosen]) or chosen[:3] == layer
    }
    entries = {f"{layer}.{entry}" for layer in moving for entry in ("running_mean", "running_var")}
    assert changed & {name for name in before if "running" in name} == entries
    kept, layers = len(bn_layers(model)) - len(moving), len(bn_layers(model))
    assert (
        f"{kept} of {layers} BN layers keep their statistics, as none of their parameters learns"
        in caplog.text
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"momentum": "0.5", "weight_decay": "0.1"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adam"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["stacked", pytest.param("inprocess", marks=pytest.mark.slow)])
def test_a_factor_of_the_rate(engine: str, options: dict[str, Any], tmp_path: Path) -> None:
    """One step at a tenth of the rate changes what the factor names as a run at that rate does."""
    path = tmp_path / "weights.safetensors"
    save_network(path, num_classes=4)
    given = {**SMALL, "engine": engine, "init_from": str(path), "model": NETWORK, **options}
    ends = {}
    for rate, chosen in ((0.1, "head=10,bn*=0.1"), (1.0, ""), (0.1, ""), (0.01, "")):
        folder = tmp_path / f"{rate}{bool(chosen)}"
        assert run("run", lr=str(rate), trainable=chosen, results_dir=str(folder), **given) == 0
        ends[rate, bool(chosen)] = weights_of_run(folder)
    for name, _ in build(NETWORK, num_classes=4, image_size=32).named_parameters():
        like = 1.0 if name.startswith("classifier") else 0.01 if name.startswith("bn") else 0.1
        assert torch.allclose(ends[0.1, True][name], ends[like, False][name], rtol=0, atol=1e-6), (
            name
        )


@pytest.mark.parametrize(
    ("number", "wrong"),
    [(number, f"a number, got {number!r}") for number in ("", "x", "inf", "nan")]
    + [("-1", "at least 0, got -1.0")],
)
def test_a_factor_that_is_none_is_named(
    number: str, wrong: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = f"head={number}"
    assert run("run", model=NETWORK, trainable=chosen, results_dir=str(tmp_path), **SMALL) == 2
    assert f"trainable: a factor of the rate must be {wrong}" in capfd.readouterr().err


def test_layers_that_keep_their_statistics_exchange_nothing(tmp_path: Path) -> None:
    given = {
        **SMALL,
        "trainable": "!blocks.*,!conv_stem.*",
        "model": NETWORK,
        "results_dir": str(tmp_path),
    }
    assert run("run", method="fedtan", **given) == 0
    (row,) = rounds(tmp_path)
    # the statistics of both layers, the gradients by those of the second, as nothing learns before
    # the first, the model
    assert row["exchanges"] == 4


@pytest.mark.slow
def test_exact_statistics_are_of_layers_that_learn(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    before = save_network(path, num_classes=4)
    given = {**SMALL, "trainable": "bn2.*,classifier.*", "init_from": str(path)}
    for statistics in ("running", "exact"):
        method, folder = f"fedavg:statistics={statistics}", str(tmp_path / statistics)
        assert run("run", model=NETWORK, method=method, results_dir=folder, **given) == 0
    running, exact = (weights_of_run(tmp_path / statistics) for statistics in ("running", "exact"))
    moved = {name for name in before if not torch.equal(exact[name], running[name])}
    assert moved == {"bn2.running_mean", "bn2.running_var"}


@pytest.mark.slow
def test_a_diagnosis_is_of_layers_that_learn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 40)
    given = {"image_size": "32", "model": NETWORK, "batches": "2", "results_dir": str(tmp_path)}
    assert run("diagnose", trainable="blocks.0.*,classifier.*", **given) == 0
    said = capfd.readouterr().out
    assert " blocks.0.0.bn1 " in said
    assert "bn2" not in said
    assert run("diagnose", trainable="head", **given) == 2
    assert (
        "there is nothing to diagnose: none of the model's BN layers has a param"
        in capfd.readouterr().err
    )


def test_methods_of_bn_need_a_layer_that_learns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {**SMALL, "trainable": "head", "model": NETWORK, "results_dir": str(tmp_path)}
    for method in (
        "fedtan",
        "fixbn",
        "fedbn",
        "mtfl",
        "fedavg:statistics=exact",
        "hbn",
        "heterofl",
    ):
        assert run("run", method=method, **given) == 2
        text = (
            f"method '{method}' would be another one: none of the model's BN layers has a "
            "parameter that learns"
        )
        assert text in capfd.readouterr().err


def test_a_pattern_without_a_parameter_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("run", model=NETWORK, trainable="fc.*", results_dir=str(tmp_path), **SMALL) == 2
    text = (
        "trainable: no parameter matches 'fc.*'; there are head, conv_stem.weight, bn1.weight, "
        "bn1.bias, ..."
    )
    assert text in capfd.readouterr().err
