"""Every model of the registry: its size, its weights, its images, its errors."""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from fedbn_flwr.models import MODELS, build, check_entries
from fedbn_flwr.norm import bn_layers

NORMS = ("bn", "gn", "none")


@pytest.mark.parametrize(
    ("name", "channels", "size", "parameters", "layers", "linear"),
    [
        ("mlp", 1, 28, 784 * 30 + 30 + 2 * 30 + 30 * 10 + 10, 1, [784, 30]),
        (
            "small-cnn",
            3,
            32,
            9 * (3 * 16 + 16 * 32 + 32 * 32) + 2 * (16 + 32 + 32) + 32 * 10 + 10,
            3,
            [32],
        ),
        ("resnet20", 3, 32, 269_722, 19, [64]),
        ("resnet18", 3, 64, None, 20, [512]),
        ("mobilenetv2", 3, 64, None, 52, [1280]),
        ("alexnet-bn", 3, 64, None, 7, [9216, 4096, 4096]),
        ("digits-cnn", 3, 28, None, 5, [6272, 2048, 512]),
        ("fedbs-mnist-cnn", 1, 28, None, 2, [1568]),
        ("fedbs-cifar-cnn", 3, 32, None, 4, [4500, 270, 150]),
    ],
)
def test_a_network_is_the_one_of_its_paper(
    name: str, channels: int, size: int, parameters: int | None, layers: int, linear: list[int]
) -> None:
    model = build(name, in_channels=channels, image_size=size)
    assert len(bn_layers(model)) == layers
    assert [
        layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)
    ] == linear
    assert parameters in (None, sum(parameter.numel() for parameter in model.parameters()))


def test_the_resnet18_for_large_images_is_torchvisions() -> None:
    model = build("resnet18", image_size=64)
    assert model.get_submodule("conv1").kernel_size == (7, 7)
    assert isinstance(model.get_submodule("maxpool"), nn.MaxPool2d)


CASES = [
    (name, size, norm)
    for name, entry in MODELS.items()
    # networks with logits for each pixel are in test_segmentation.py
    if entry.task != "segmentation"
    for size in sorted({entry.smallest, entry.largest or max(entry.smallest, 28)})
    # 57 million weights: once is enough
    for norm in (NORMS if name != "alexnet-bn" else NORMS[:1])
]


@pytest.mark.parametrize(("name", "size", "norm"), CASES)
@pytest.mark.sampled(20)
def test_forward_and_backward_on_images_of_one_or_three_channels(
    name: str, size: int, norm: str
) -> None:
    channels = 1 if norm == "gn" else 3
    model = build(name, num_classes=7, in_channels=channels, image_size=size, norm=norm)
    logits = model(torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("name", ["lenet", "small-cnn", "resnet20", "mobilenetv2"])
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    first, before = build(name, seed=3).state_dict(), torch.get_rng_state()
    for norm in NORMS:
        again = build(name, seed=3, norm=norm).state_dict()
        assert all(torch.equal(first[key], again[key]) for key in first.keys() & again.keys())
    other = build(name, seed=4).state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_starting_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    state = build("small-cnn", seed=1).state_dict()
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    started = build("small-cnn", seed=2, init_from=path).state_dict()
    assert all(
        torch.equal(started[key], state[key]) and started[key].dtype == state[key].dtype
        for key in state
    )


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({**build("small-cnn").state_dict(), "extra": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"Unexpected key.* \"extra\""):
        build("small-cnn", init_from=path)
    with pytest.raises(ValueError, match=r"Missing key.*\[\.\.\.\]$"):
        build("resnet20", init_from=path)
    torch.save(build("small-cnn", in_channels=1).state_dict(), path)
    with pytest.raises(ValueError, match=r"size mismatch for 0\.weight.*16, 1, 3, 3.*16, 3, 3, 3"):
        build("small-cnn", init_from=path)


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("0.weight", float("nan"), "entry '0.weight' has a value that is not a finite number"),
        (
            "1.running_mean",
            float("-inf"),
            "entry '1.running_mean' has a value that is not a finite number",
        ),
        ("1.running_var", -1e-3, "entry '1.running_var' has a variance below 0"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_values_that_weights_cannot_have_are_named(
    suffix: str, entry: str, value: float, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / f"weights.{suffix}"
    state = build("small-cnn").state_dict()
    state[entry].reshape(-1)[-1] = value
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    with pytest.raises(ValueError, match=f"^{path}: {re.escape(reason)}$"):
        build("small-cnn", init_from=path)


def test_a_file_is_measured_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed, many = (tmp_path / name for name in ("plain.pt", "packed.pt", "many.pt"))
    torch.save({"0.weight": torch.zeros(2**25)}, plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert packed.stat().st_size < 2**20
    torch.save({str(number): torch.zeros(1) for number in range(3000)}, many)
    several = tmp_path / "several.safetensors"
    save_file({str(number): torch.zeros(1) for number in range(3000)}, several)
    with monkeypatch.context() as unread:
        unread.setattr("torch.load", Mock(side_effect=AssertionError("it was unpacked")))
        with pytest.raises(
            ValueError,
            match=r"packed.pt unpacks to 134,\d+,\d+ bytes, and at most .* for this model",
        ):
            build("small-cnn", init_from=packed)
        for path in (many, several):
            with pytest.raises(
                ValueError, match=rf"{path.name} has 3,\d+ entries, and at most 1,\d+ are read"
            ):
                build("small-cnn", init_from=path)
    # one storage with many names
    shared = torch.zeros(1)
    torch.save({str(number): shared for number in range(3000)}, many)
    with pytest.raises(ValueError, match="has 3,000 entries, and at most"):
        build("small-cnn", init_from=many)
    # averages of weights and an optimizer's state may lie beside
    state = build("small-cnn").state_dict()
    torch.save({"model": state, "ema": state, "optimizer": {"state": [state, state]}}, plain)
    build("small-cnn", init_from=plain)


def test_a_head_of_another_width_is_no_head_of_another_number_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    state = build("small-cnn", num_classes=5).state_dict()
    head = next(name for name in reversed(state) if name.endswith("weight"))
    state[head] = torch.zeros(5, state[head].shape[1] + 1)
    torch.save(state, path)
    with pytest.raises(ValueError, match=f"size mismatch for {head}"):
        build("small-cnn", num_classes=10, init_from=path)


def _save_cut(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent.pt": (lambda path: None, "there is no file .*"),
    "garbage.pt": (lambda path: path.write_bytes(b"not a tensor in sight"), ""),
    "garbage.safetensors": (lambda path: path.write_bytes(b"not a tensor in sight"), ""),
    "cut.safetensors": (
        lambda path: path.write_bytes(save(build("mlp").state_dict())[:-9]),
        "neither safetensors nor",
    ),
    # these read as programs, of which the first takes from an empty stack and the second names an
    # absent object
    "pickle.pt": (
        lambda path: path.write_bytes(b"."),
        "neither safetensors nor a torch state dict",
    ),
    "absent-object.pt": (
        lambda path: path.write_bytes(b"h\x07."),
        "neither safetensors nor a torch state dict",
    ),
    "cut.pt": (
        lambda path: _save_cut(build("mlp"), path),
        "neither safetensors nor a torch state dict",
    ),
    "numbered.pt": (
        lambda path: torch.save({0: torch.ones(1)}, path),
        "does not hold a state dict",
    ),
    "list.pt": (lambda path: torch.save([1, 2], path), "does not hold a state dict"),
    "code.pt": (lambda path: torch.save(build("mlp"), path), ""),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_no_weights(name: str, tmp_path: Path) -> None:
    write, message = FILES[name]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message or name) as refusal:
        build("small-cnn", init_from=tmp_path / name)
    assert name in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("resnet21", 32, "unknown model 'resnet21'; did you mean 'resnet20'?"),
        ("digits-cnn", 32, "cannot take 32x32 images; it takes those of 28x28 only"),
        ("alexnet-bn", 32, "cannot take 32x32 images; it takes those of 63x63 and more"),
        (".=:x", 32, "unknown model '.=:x'; known: "),
        (
            "timm:resnet18.nonsense",
            32,
            "timm has no model 'resnet18.nonsense'; known: resnet18, resnet18.",
        ),
        ("tim:resnet18", 32, "cannot import 'tim': .*; did you mean 'timm:NAME'"),
        ("nosuchpackage.models:make", 32, "cannot import 'nosuchpackage.models'"),
        ("torchvision.models:nosuchmodel", 32, "has no function 'nosuchmodel'"),
        ("collections:Counter", 32, "returned a Counter, not a torch.nn.Module"),
    ],
)
def test_errors_say_what_was_wrong_and_what_is_allowed(name: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, image_size=size)


def test_a_model_of_ones_own_gets_the_arguments_that_it_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def linear(image_size, num_classes):\n"
        "    layers = nn.Flatten(), nn.Linear(image_size, num_classes), "
        "nn.BatchNorm1d(num_classes)\n"
        "    return nn.Sequential(*layers)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build("own_models:linear", num_classes=6, image_size=9, norm="gn")
    assert model.get_submodule("1").in_features == 9
    assert isinstance(model.get_submodule("2"), nn.GroupNorm)


def test_lazy_layers_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_models.py").write_text(
        "from torch import nn\n"
        "def lazy():\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3), nn.LazyBatchNorm1d())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"has lazy layers \('1.weight' has no shape yet\)"):
        build("lazy_models:lazy")


class Adapted(nn.Sequential):
    """A layer that stands still, and one behind it, whose entries are the state."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the entries of the last layer."""
        entries = super().state_dict(*args, **options)
        return {name: value for name, value in entries.items() if name.startswith("1.")}


def test_a_state_may_lack_what_does_not_learn() -> None:
    first = nn.Linear(4, 4).requires_grad_(False)
    model = Adapted(first, nn.Linear(4, 3))
    check_entries("adapted", model)
    first.requires_grad_()
    with pytest.raises(ValueError, match=r"'adapted' has no parameter '0.weight' in its state"):
        check_entries("adapted", model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_entries_of_types_that_numpy_lacks_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    check_entries("half", model.half())
    model.get_submodule("1").running_mean = torch.zeros(4).to(dtype)
    with pytest.raises(ValueError, match=rf"lack: '1.running_mean', {dtype}: return model.float"):
        check_entries("half", model)


def test_the_models_of_other_libraries_get_the_number_of_classes() -> None:
    model = build("torchvision.models:squeezenet1_1", num_classes=6)
    assert model.get_submodule("classifier.1").out_channels == 6
