"""Swapping the normalizers of any model, in which BN is told by type."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers.norm import GroupNorm1
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models import mobilenet_v2, resnet18

from fedbn_flwr.models import build
from fedbn_flwr.norm import (
    NORMS,
    BatchNorm,
    bn_keys,
    bn_layers,
    lacks,
    local_keys,
    normalize_features,
    replace,
    statistics_keys,
)
from fedbn_flwr.norm.layers import GroupNorm

MODELS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "resnet18": (resnet18, 20),
    "mobilenet_v2": (mobilenet_v2, 52),
}


DTYPES = (torch.bfloat16, torch.bfloat16, torch.float64)


def kinds(model: nn.Module) -> Counter[type[nn.Module]]:
    return Counter(type(layer) for layer in model.modules())


def images(size: int, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["bn", "gn", "ln", "in"])
def test_torchvision_models_there_and_back(name: str, kind: str) -> None:
    make, layers = MODELS[name]
    model = make(weights=None, num_classes=4)
    keys = [key for key, _ in model.named_parameters()]
    assert replace(model, kind) is model
    assert kinds(model)[nn.BatchNorm2d if kind == "bn" else GroupNorm] == layers
    assert [key for key, _ in model.named_parameters()] == keys
    if kind != "in":  # at this size the last layers have one position left
        model(images(64)).sum().backward()
    assert len(bn_layers(replace(model, "bn"))) == layers
    assert model(images(64)).shape == (2, 4)


def test_a_bias_takes_the_place_of_beta_only_where_there_was_one() -> None:
    def convolution(affine: bool) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=affine))

    with_beta = replace(convolution(True), "none").get_submodule("0")
    assert isinstance(with_beta.bias, nn.Parameter)
    assert with_beta.bias.tolist() == [0.0] * 4
    assert replace(convolution(False), "none").get_submodule("0").bias is None


def learning_in(kind: str, freeze: Callable[[str], bool], **options: Any) -> set[str]:
    """Return the names of what learns after a normalizer has come into a partly frozen
    ResNet-20.
    """
    model = build("resnet20", seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze(name))
    return {
        name
        for name, parameter in replace(model, kind, **options).named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in NORMS), ("wsconv", {"gain": "learnable"})]
)
def test_what_was_frozen_stays_frozen_and_nothing_else_is(
    kind: str, options: dict[str, Any]
) -> None:
    """The first half is frozen, as for fine-tuning."""
    first = tuple(f"{name}." for name in ("conv1", "bn1", "layer1", "layer2"))
    unfrozen = learning_in(kind, lambda _: False, **options)
    left = {name for name in unfrozen if not name.startswith(first)}
    assert learning_in(kind, lambda name: name.startswith(first), **options) == left


def test_the_parameters_of_a_normalizer_are_frozen_one_by_one() -> None:
    names = learning_in("hbn", lambda name: "bn" in name and name.endswith(".weight"))
    assert {name.rpartition(".")[2] for name in names if name.startswith("bn1.")} == {"bias", "mix"}
    assert "bn1.mix" not in learning_in("hbn", lambda name: "bn" in name)
    # where all beta are frozen, so are the biases that take their place
    assert "conv1.bias" not in learning_in(
        "none", lambda name: "bn" in name or name.startswith("layer1.0.downsample")
    )
    with_prelu = BatchNormAct2d(4, act_layer=nn.PReLU)
    with_prelu.act.requires_grad_(False)
    model = replace(nn.Sequential(with_prelu), "gn")
    assert {name for name, each in model.named_parameters() if not each.requires_grad} == {
        "0.2.weight"
    }


def test_bn_that_is_there_already_is_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2), BatchNorm(2), BatchNormAct2d(4))
    before = list(model)
    replace(model, "bn")
    assert list(model) == before


def test_foreign_group_and_instance_norm_become_bn() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4, eps=1e-3), nn.InstanceNorm2d(4), nn.LayerNorm(4))
    replace(model, "bn")
    assert [type(layer) for layer in model] == [BatchNorm, BatchNorm, nn.LayerNorm]
    assert model[0].eps == 1e-3
    assert model[0].momentum == 0.1
    assert model[0].affine
    assert not model[1].affine


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(4), (5, 4)),
        (nn.BatchNorm1d(4), (5, 4, 6)),
        (nn.BatchNorm2d(4), (5, 4, 3, 2)),
        (nn.BatchNorm3d(4), (2, 4, 3, 2, 2)),
        (nn.SyncBatchNorm(4), (5, 4, 3, 2)),
        (nn.BatchNorm2d(4, affine=False), (5, 4, 3, 2)),
        (nn.BatchNorm2d(4, track_running_stats=False), (5, 4, 3, 2)),
        (nn.BatchNorm2d(4, affine=False, track_running_stats=False), (5, 4, 3, 2)),
    ],
)
@pytest.mark.parametrize(("kind", "groups"), [("gn", 2), ("ln", 1), ("in", 4)])
def test_every_kind_of_bn_against_numpy(
    layer: _BatchNorm, shape: tuple[int, ...], kind: str, groups: int
) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    new = replace(nn.Sequential(layer), kind).double()
    if kind == "in" and len(shape) == 2:
        with pytest.raises(ValueError, match=r"layer '0' would normalize groups of a single value"):
            new(inputs)
        return
    grouped = inputs.numpy().reshape(shape[0], groups, -1)
    centred = grouped - grouped.mean(axis=2, keepdims=True)
    expected = centred / np.sqrt(grouped.var(axis=2, keepdims=True) + layer.eps)
    np.testing.assert_allclose(new(inputs).detach().numpy(), expected.reshape(shape), atol=1e-12)
    assert (new.get_submodule("0").weight is None) == (not layer.affine)


def test_bn_of_any_number_of_dimensions_is_torchs() -> None:
    generator = torch.Generator().manual_seed(2)
    own = BatchNorm(4)
    for theirs, shape in [(nn.BatchNorm1d(4), (5, 4)), (nn.BatchNorm3d(4), (5, 4, 2, 2, 2))]:
        inputs = torch.randn(shape, generator=generator)
        own.reset_running_stats()
        assert torch.equal(own(inputs), theirs(inputs))
        assert all(
            torch.equal(own.state_dict()[key], value) for key, value in theirs.state_dict().items()
        )
    with pytest.raises(ValueError, match="expected an input of shape"):
        own(torch.ones(4))


def test_a_shared_layer_stays_shared() -> None:
    shared = nn.BatchNorm1d(4)
    model = replace(nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared)), "gn")
    assert isinstance(model.get_submodule("0"), GroupNorm)
    assert model.get_submodule("0") is model.get_submodule("1.1")


@pytest.mark.parametrize("affine", [True, False])
def test_device_precision_and_mode_are_the_layers_own_or_else_the_models(affine: bool) -> None:
    bare = (
        nn.BatchNorm2d(4, affine=affine, track_running_stats=False)
        .to("meta", torch.bfloat16)
        .eval()
    )
    whole = nn.BatchNorm2d(4, affine=affine).double()
    model = nn.Sequential(nn.Conv2d(3, 4, 1).to("meta", torch.bfloat16), bare, whole)
    for layer, device, dtype in zip(
        replace(model, "brn").children(), ("meta", "meta", "cpu"), DTYPES, strict=True
    ):
        values = [
            *layer.parameters(),
            *(buffer for buffer in layer.buffers() if buffer.is_floating_point()),
        ]
        assert {(value.device.type, value.dtype) for value in values} == {(device, dtype)}
    assert [layer.training for layer in model] == [True, False, True]


def test_what_is_put_in_starts_fresh() -> None:
    layer = nn.BatchNorm2d(4, eps=0.3)
    nn.init.constant_(layer.weight, 5.0)
    fresh = replace(nn.Sequential(layer), "gn").get_submodule("0")
    assert isinstance(fresh, GroupNorm)
    assert fresh.eps == 0.3
    assert fresh.weight.tolist() == [1.0] * 4
    assert fresh.bias.tolist() == [0.0] * 4


@pytest.mark.parametrize(("kind", "left"), [("gn", ["0.weight"]), ("none", [])])
def test_gamma_without_beta_stays_so(kind: str, left: list[str]) -> None:
    layer = nn.BatchNorm2d(4)
    layer.register_parameter("bias", None)
    new = replace(nn.Sequential(layer), kind)
    assert [name for name, _ in new.named_parameters()] == left
    new(torch.randn(2, 4, 3, 3))


def test_the_activation_inside_timms_bn_stays() -> None:
    model = replace(nn.Sequential(BatchNormAct2d(4)), "gn")
    outputs = model(torch.randn(2, 4, 3, 3))
    assert isinstance(model.get_submodule("0.0"), GroupNorm)
    assert outputs.min() == 0.0


class WithActivation(nn.BatchNorm2d):
    """BN with an activation that is no layer of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, and cut off what is below zero."""
        return super().forward(input).relu()


def test_a_forward_that_is_lost_is_said(caplog: pytest.LogCaptureFixture) -> None:
    replace(nn.Sequential(nn.BatchNorm2d(4), GroupNorm1(4), BatchNormAct2d(4)), "gn")
    assert not caplog.messages
    replace(nn.Sequential(WithActivation(4)), "gn")
    text = "layer '0' is a WithActivation with a forward of its own: GroupNorm takes its place"
    assert text in caplog.text


class Scaled(nn.BatchNorm1d):
    """BN that learns something else, too."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = nn.Parameter(torch.ones(1))


BRANCH_SCALE = "branch_scale must be auto, paper or a number above 0"


@pytest.mark.parametrize(
    ("layer", "kind", "options", "message"),
    [
        (
            nn.BatchNorm2d(6),
            "gn",
            {"groups": 4},
            "layer '1': 6 channels do not divide into 4 groups",
        ),
        (nn.BatchNorm2d(6), "gn", {"groups": 0}, "0 groups"),
        (nn.LazyBatchNorm2d(), "gn", {}, "layer '1' is lazy"),
        (Scaled(4), "gn", {}, "layer '1' is a Scaled with scale, which GroupNorm would drop"),
        (nn.BatchNorm1d(4), "brn", {"r_max": 0.5}, r"not 0\.5 and 5\.0"),
        (
            nn.BatchNorm1d(4),
            "fixup",
            {},
            r"BasicBlock and Bottleneck \(resnet20, resnet18 and its kin\)",
        ),
        (
            weight_norm(nn.Conv2d(2, 3, 3)),
            "wsconv",
            {},
            "layer '1' computes its weight, which cannot be standardized",
        ),
        (
            nn.ReLU(),
            "wsconv",
            {"gain": "free"},
            "unknown gain 'free'; there are: constant, learnable",
        ),
        *(
            (nn.ReLU(), "wsconv", {"branch_scale": scale}, BRANCH_SCALE)
            for scale in ("brock", 0, -1.0, math.nan)
        ),
        (
            nn.ReLU(),
            "batch",
            {},
            r"unknown normalizer 'batch'; known: bn, gn, ln, in, gn-ws, .*fixup",
        ),
        (nn.ReLU(), "ln", {"eps": 1.0}, "normalizer 'ln' has no option 'eps'; its options: none"),
    ],
)
def test_what_cannot_be_is_refused(
    layer: nn.Module, kind: str, options: dict[str, Any], message: str
) -> None:
    before = [nn.BatchNorm2d(4), layer]
    model = nn.Sequential(*before)
    with pytest.raises(ValueError, match=message):
        replace(model, kind, **options)
    # a convolution is only looked at when the normalizers are gone
    assert isinstance(layer, nn.Conv2d) or list(model) == before


def test_a_trained_model_may_hold_what_is_no_tensor_yet(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    layer = nn.BatchNorm2d(4)
    layer.load_state_dict({**layer.state_dict(), "running_mean": torch.ones(4)})
    replace(nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.LazyLinear(2)), "gn")
    # BN's statistics and counter
    assert (
        "the normalizer 'gn' drops or changes 3 of 7 entries of the weights, such as '1.running_m"
        in flower_log.text
    )
    with torch.device("meta"):
        replace(nn.Sequential(nn.BatchNorm2d(4)), "gn")


def test_says_what_a_trained_network_without_bn_loses(flower_log: pytest.LogCaptureFixture) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))

    replace(network(), "none")
    assert not flower_log.text
    trained = network()
    trained.load_state_dict({**trained.state_dict(), "1.bias": torch.ones(4)})
    replace(trained, "none")
    assert (
        "the normalizer 'none' drops or changes 2 of 4 entries of the weights, such as '1.weight'"
        in flower_log.text
    )


def test_says_that_there_was_nothing_to_replace(flower_log: pytest.LogCaptureFixture) -> None:
    class Bare(nn.Sequential):
        """Has no normalizer."""

    replace(Bare(nn.Linear(2, 2)), "gn")
    assert "the normalizer 'gn' takes no layer's place in the Bare" in flower_log.text


def test_says_that_bn_takes_the_place_of_others(flower_log: pytest.LogCaptureFixture) -> None:
    class Grouped(nn.Sequential):
        """Has BN and other normalizers."""

    replace(Grouped(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)), "bn")
    assert not flower_log.text
    replace(
        Grouped(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), "bn"
    )
    assert "BN takes the place of 2 normalizers of other kinds in the Grouped" in flower_log.text


def test_normalized_features_have_no_length() -> None:
    model, plain = build("mlp", normalize_features=True), build("mlp")
    assert list(model.state_dict()) == list(plain.state_dict())
    classify = [*model.modules()][-1]
    assert isinstance(classify, nn.Linear)
    features = torch.randn(4, classify.in_features)
    torch.testing.assert_close(classify(1000 * features), classify(features))
    scaled = features / features.pow(2).mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(classify(features), [*plain.modules()][-1](scaled))
    with pytest.raises(ValueError, match="normalize-features needs a model with a linear layer"):
        normalize_features(nn.Sequential(nn.Conv2d(3, 10, 1), nn.Flatten()))


def test_the_momentum_of_bn() -> None:
    model = build("resnet20", norm="bn", momentum=0.02)
    assert {layer.momentum for layer in bn_layers(model).values()} == {0.02}
    assert {layer.momentum for layer in bn_layers(build("resnet20")).values()} == {0.1}


# ---- what is BN in a model -----------------------------------------------------------------------


def test_every_kind_of_bn_and_nothing_else() -> None:
    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2), nn.Linear(2, 2)]
    model = nn.Sequential(*kinds, *others)
    assert list(bn_layers(model)) == ["0", "1", "2", "3"]
    assert local_keys(model) == []


def test_a_root_that_is_bn() -> None:
    layer = nn.BatchNorm2d(3)
    assert bn_layers(layer) == {"": layer}
    assert bn_keys(layer) == list(layer.state_dict())
    assert statistics_keys(layer) == ["running_mean", "running_var"]


def test_a_shared_layer_is_listed_once_but_has_all_its_keys() -> None:
    shared, last = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), last)
    assert bn_layers(model) == {"0": shared, "2": last}
    assert bn_keys(model) == list(model.state_dict())
    assert statistics_keys(model)[2:4] == ["1.1.running_mean", "1.1.running_var"]


@pytest.mark.filterwarnings("ignore")
def test_bn_in_a_traced_model_is_no_layer_of_torchs() -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.rand(4, 2))
    assert not bn_layers(traced)
    assert lacks(traced, "bn").startswith("layer '1', of the class TracedModule, has running")
