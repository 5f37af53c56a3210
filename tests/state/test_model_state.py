"""State between PyTorch and Flower: names, dtypes and shapes survive, and nothing that does not fit
gets in.
"""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torchvision.models import mobilenet_v2

from fedbn_flwr import state
from fedbn_flwr.wire import GROUPS
from tests.helpers.toys import assert_same_state, random_state, toy_cnn


def test_a_parameter_can_be_sent_as_it_is() -> None:
    model = toy_cnn()
    received = state.from_record(state.to_record(dict(model.named_parameters())))
    assert not any(value.requires_grad for value in received.values())


def test_load_overwrites_the_whole_state_and_shares_nothing() -> None:
    model, wanted = toy_cnn(), random_state(toy_cnn())
    given = {name: value.clone() for name, value in reversed(wanted.items())}
    state.load(model, given)
    for value in given.values():
        value.zero_()
    assert_same_state(model.state_dict(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_keeps_the_models_dtypes(dtype: torch.dtype) -> None:
    model = toy_cnn().to(dtype)
    wanted = {name: value + 1 for name, value in model.state_dict().items()}
    # what Flower's own averaging makes of a counter
    state.load(model, {name: value.double() for name, value in wanted.items()})
    assert_same_state(model.state_dict(), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"1.running_var": None, "1.running_mean": None},
            "2 entries .* not received, the first is '1.running_mean'",
        ),
        ({"extra": torch.zeros(1)}, "1 received arrays .* the first is 'extra'"),
        ({"5.bias": torch.zeros(7)}, r"'5.bias' has shape \(7,\), the model needs \(4,\)"),
        (
            {"1.num_batches_tracked": torch.zeros(1)},
            r"'1.num_batches_tracked' has shape \(1,\), the model needs \(\)",
        ),
    ],
)
def test_load_names_what_does_not_fit_and_leaves_the_model_alone(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    model = toy_cnn()
    before = state.snapshot(model)
    given = {
        name: value for name, value in (random_state(model) | change).items() if value is not None
    }
    with pytest.raises(ValueError, match=message):
        state.load(model, given)
    assert_same_state(model.state_dict(), before)


def test_groups_go_by_type_not_by_name() -> None:
    model = mobilenet_v2(num_classes=10)
    layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    assert len(layers) == 52
    assert not any("bn" in name for name in layers)

    def entries(*kinds: str) -> set[str]:
        return {f"{layer}.{kind}" for layer in layers for kind in kinds}

    statistics = entries("running_mean", "running_var", "num_batches_tracked")
    affine = entries("weight", "bias")
    expected = {
        "none": set(),
        "statistics": statistics,
        "affine": affine,
        "bn": statistics | affine,
        "mix": set(),
    }
    expected["all"] = set(model.state_dict())
    assert {group: state.group_keys(model, group) for group in GROUPS} == expected


def test_groups_of_partial_bn_hold_only_what_there_is() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, track_running_stats=False)
    )
    assert state.group_keys(model, "affine") == {"1.weight", "1.bias"}
    assert state.group_keys(model, "statistics") == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }


class Telling(nn.Linear):
    """Has more in its state dict than parameters and buffers."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(1.0)

    def set_extra_state(self, value: torch.Tensor) -> None:
        self.told = value


def test_a_snapshot_has_whatever_the_state_dict_has() -> None:
    model = nn.Sequential(Telling(2, 2))
    assert set(state.snapshot(model)) == {"0.weight", "0.bias", "0._extra_state"}


def test_a_model_without_a_state() -> None:
    model, record = nn.Sequential(nn.ReLU()), state.to_record({})
    assert record == ArrayRecord()
    assert state.from_record(record) == {}
    state.load(model, state.view_record(record))
    assert dict(state.snapshot(model)) == {}
