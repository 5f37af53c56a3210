"""What users register: found by name like what is there already, and never in place of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr import data, models, norm
from fedbn_flwr.data import (
    DATASETS,
    PARTITIONS,
    Data,
    DatasetRequest,
    PartitionRequest,
    Split,
    register_dataset,
    register_partition,
)
from fedbn_flwr.models import MODELS, register_model
from fedbn_flwr.norm import NORMS, Slot, register_norm, swap_normalizers
from fedbn_flwr.plugins import MissingExtraError, add, extra, load_plugins, same_definition
from fedbn_flwr.strategies import REGISTRY, register_strategy
from tests.helpers.registered import registries_restored

REGISTRIES: dict[str, tuple[dict[str, Any], Any]] = {
    "strategy": (REGISTRY, register_strategy),
    "normalizer": (NORMS, register_norm),
    "model": (MODELS, register_model),
    "data set": (DATASETS, register_dataset),
    "partition": (PARTITIONS, register_partition),
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Forget what a test registers."""
    with registries_restored():
        yield


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_name_that_is_there_is_refused_with_those_that_are_known(kind: str) -> None:
    items, register = REGISTRIES[kind]
    name, before = next(iter(items)), dict(items)
    with pytest.raises(
        ValueError, match=f"{kind} '{name}' is there already; known: {', '.join(items)}"
    ):
        register(name)(lambda *_: None)
    assert items == before


@pytest.mark.parametrize(
    "name", ["", "My-Own", "my own", "my+own", "my_own", "own=1", "-own", "1own", "own-"]
)
@pytest.mark.parametrize("kind", ["strategy", "normalizer", "model", "data set"])
def test_a_name_that_a_command_could_misread_is_refused(kind: str, name: str) -> None:
    items, register = REGISTRIES[kind]
    with pytest.raises(ValueError, match="a name has lower-case letters"):
        register(name)(lambda *_: None)
    assert name not in items


def test_a_definition_that_is_run_again_takes_the_place_of_the_one_before() -> None:
    for value in (1, 2):

        @register_model("again")
        def again(
            num_classes: int, in_channels: int, image_size: int, value: int = value
        ) -> nn.Module:
            return nn.Linear(value, value)

    model = models.build("again")
    assert isinstance(model, nn.Linear)
    assert model.in_features == 2


def test_two_lambdas_are_two_definitions() -> None:
    one, other = (lambda: 1), (lambda: 1)
    assert same_definition(one, one)
    assert not same_definition(one, other)
    items: dict[str, Any] = {}
    add(items, "thing", "one", one)
    with pytest.raises(ValueError, match="thing 'one' is there already"):
        add(items, "thing", "one", other)


def test_a_normalizer_of_ones_own_is_built_into_models_with_its_options() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.factor

    @register_norm("scaled")
    def scaled(model: nn.Module, factor: float = 2.0) -> nn.Module:
        def make(slot: Slot) -> nn.Module:
            return Scaled(factor)

        return swap_normalizers(model, make)

    layers = list(models.build("small-cnn", norm="scaled", factor=3.0).modules())
    assert [layer.factor for layer in layers if isinstance(layer, Scaled)] == [3.0] * 3
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in layers)
    with pytest.raises(
        ValueError, match="normalizer 'scaled' has no option 'offset'; its options: factor"
    ):
        norm.replace(nn.BatchNorm2d(2), "scaled", offset=1)


def grey(count: int = 12) -> Data:
    inputs = torch.arange(count * 16, dtype=torch.float32).reshape(count, 1, 4, 4) / (count * 16)
    split = Split(inputs, torch.arange(count) % 2)
    return Data("grey", split, split, num_classes=2)


def test_a_data_set_of_ones_own_is_read_once_with_its_argument() -> None:
    calls = []

    @register_dataset("grey")
    def read(request: DatasetRequest) -> Data:
        calls.append(request.argument)
        return grey(**request.options(count=12))

    assert len(data.load("grey:count=20").train) == 20
    assert data.load("grey") is data.load("grey")
    assert calls == ["count=20", ""]
    with pytest.raises(ValueError, match="grey: unknown option 'size'; known: count"):
        data.load("grey:size=1")


def test_a_partition_of_ones_own_shares_out_rows_in_shuffled_order() -> None:
    @register_partition("first:COUNT")
    def first(request: PartitionRequest) -> list[NDArray[np.int64]]:
        count = request.number(0)
        return [np.arange(count), np.arange(count, request.samples)]

    parts = data.partition("first:3", grey(), clients=2, seed=1)
    assert [len(part) for part in parts] == [3, 9]
    assert sorted(np.concatenate(parts)) == list(range(12))
    assert list(parts[0]) != [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"partition 'first:no' \(first:COUNT\): expected a whole number"
    ):
        data.partition("first:no", grey(), clients=2, seed=1)
    with pytest.raises(
        ValueError, match="partition 'first:3' has samples for 2 clients, not for 3"
    ):
        data.partition("first:3", grey(), clients=3, seed=1)

    @register_partition("same")
    def same(request: PartitionRequest) -> list[NDArray[np.int64]]:
        return [np.arange(2)] * request.clients

    with pytest.raises(ValueError, match=r"partition 'same' gives sample \d+ to two clients"):
        data.partition("same", grey(), clients=2, seed=1)


# ---- importing users' modules --------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_several_modules_are_imported_each_once(modules: Path) -> None:
    for name in ("one_plugin", "other_plugin"):
        (modules / f"{name}.py").write_text(
            "from fedbn_flwr.norm import register_norm\n"
            f"@register_norm('{name.replace('_', '-')}')\n"
            "def swap(model):\n    return model\n"
        )
    load_plugins("one_plugin, other_plugin,")
    kept = NORMS["one-plugin"]
    load_plugins("one_plugin")
    load_plugins("")
    assert NORMS["one-plugin"] is kept
    assert "other-plugin" in NORMS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all", "plugins: cannot import 'nowhere.at_all': No module named 'nowhere'"),
        (
            "half_plugin",
            "plugins: cannot import 'half_plugin': No module named 'something_missing'",
        ),
        ("my/file.py", "plugins: 'my/file.py' is not the name of a module"),
        (".relative", "plugins: '.relative' is not the name of a module"),
    ],
)
def test_what_cannot_be_imported_is_named(modules: Path, name: str, message: str) -> None:
    (modules / "half_plugin.py").write_text("import something_missing\n")
    with pytest.raises(ValueError, match=message):
        load_plugins(name)


def test_a_package_that_is_there_and_cannot_be_imported_is_said() -> None:
    said = "^what the extra 'data' installs cannot be imported: cannot import name 'nothing' from"
    with pytest.raises(MissingExtraError, match=said), extra("data"):
        from math import nothing  # type: ignore[attr-defined]  # noqa: F401
