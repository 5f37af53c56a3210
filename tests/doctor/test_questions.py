"""What docs/questions.md says of code is so."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.common.secure_aggregation.quantization import quantize
from flwr.server.workflow import SecAggPlusWorkflow
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fedbn_flwr import run
from fedbn_flwr.doctor.findings import KINDS
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import ROOT

PAGE = (ROOT / "docs" / "questions.md").read_text()
APPS = Path(__file__).parent / "apps"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)


def test_each_finding_that_is_wrong_is_linked_and_each_link_is_one() -> None:
    linked = set(re.findall(r"doctor\.md#([a-z-]+)\)", PAGE))
    assert linked <= KINDS.keys()
    wrong = {name for name, kind in KINDS.items() if kind.level == "wrong"}
    assert wrong - linked == {"node-failed"}
    assert len(re.findall("^### ", PAGE, re.M)) >= 25


def test_the_code_runs() -> None:
    torch.manual_seed(0)
    model = Net()
    states = [Net().state_dict() for _ in range(3)]
    names: dict[str, Any] = {
        "model": model,
        "states": states,
        "kept": {name: value for name, value in states[0].items() if "bn" in name},
        "received": {name: value for name, value in states[1].items() if "bn" not in name},
        "context": SimpleNamespace(state=RecordDict()),
        "ArrayRecord": ArrayRecord,
        "weights": (0.2, 0.8),
        "means": (np.zeros(3), np.ones(3)),
        "variances": (np.ones(3), np.full(3, 2.0)),
        "torch": torch,
        "np": np,
    }
    for block in re.findall(r"```py\n(.*?)```", PAGE, re.S):
        exec(block, names)
    assert names["layers"] == ["bn1"]
    assert list(names["context"].state["bn"]) == [name for name in states[0] if "bn1" in name]
    # data of two nodes: the variance of all of it
    draws = np.random.default_rng(0)
    first = draws.normal(0, 1, 10_000)
    second = draws.normal(3, 1, 10_000)
    whole = np.concatenate([first, second])
    names |= {"weights": (0.5, 0.5), "means": (first.mean(), second.mean())}
    names["variances"] = (first.var(), second.var())
    (block,) = (each for each in re.findall(r"```py\n(.*?)```", PAGE, re.S) if "(m - mean)" in each)
    exec(block, names)
    assert names["variance"] == pytest.approx(whole.var())
    names["set_parameters"](model, names["get_parameters"](Net()))
    assert not model.bn1.training


def test_errors_have_these_texts() -> None:
    state = Net().state_dict()
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output"):
        state["bn1.num_batches_tracked"] += 0.5 * torch.ones(())
    del state["bn1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"bn1.num_batches_tracked"'):
        Net().load_state_dict(state)
    Net().load_state_dict(state, strict=False)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        nn.BatchNorm1d(3)(torch.zeros(1, 3))
    nn.BatchNorm2d(3)(torch.zeros(1, 3, 2, 2))
    assert "module.bn1.weight" in nn.DataParallel(Net()).state_dict()


@pytest.mark.slow
def test_a_compiled_model_has_these_names() -> None:
    compiled: Any = torch.compile(Net())
    assert "_orig_mod.bn1.weight" in compiled.state_dict()


def test_a_variance_below_zero_is_nan_in_evaluation_only() -> None:
    layer = nn.BatchNorm1d(2)
    assert layer.running_var is not None
    layer.running_var.fill_(-0.1)
    inputs = torch.randn(5, 2)
    assert layer.eval()(inputs).isnan().all()
    assert not layer.train()(inputs).isnan().any()


def test_flowers_local_privacy_adds_noise_to_variances() -> None:
    app = ClientApp(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)])
    sent, trained = (RecordDict({"arrays": ArrayRecord(Net().state_dict())}) for _ in range(2))
    app.train()(lambda message, _: Message(trained, reply_to=message))
    grid = InProcessGrid(app, 1)  # messages are those of its run
    question = Message(sent, dst_node_id=1000, message_type="train")
    (reply,) = grid.send_and_receive([question])
    (arrays,) = reply.content.array_records.values()
    assert not torch.equal(arrays.to_torch_state_dict()["bn1.running_var"], torch.ones(4))


def test_momentum_is_the_weight_of_what_is_new() -> None:
    layer = nn.BatchNorm1d(1, momentum=0.1)
    for _ in range(5):
        layer(torch.tensor([[1.0], [3.0]]))
    assert layer.running_mean == pytest.approx(2 * (1 - 0.9**5))
    assert "59 %" in PAGE
    assert round(100 * 0.9**5) == 59


class Checkpointed(nn.Module):
    """One BN layer, which a checkpoint runs twice a step."""

    def __init__(self, num_classes: int = 2, *, twice: bool = True, momentum: float = 0.1) -> None:
        super().__init__()
        self.twice = twice
        self.norm = nn.BatchNorm1d(3, momentum=momentum)
        self.last = nn.Linear(3, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor
        if self.twice:
            normalized = checkpoint(self.norm, inputs, use_reentrant=False)
        else:
            normalized = self.norm(inputs)
        return torch.as_tensor(self.last(normalized))


def test_a_checkpointed_part_counts_a_mini_batch_twice() -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + 5
    moved = {}
    for twice, momentum in ((True, 0.1), (False, 0.19), (True, 1 - 0.9**0.5), (False, 0.1)):
        model = Checkpointed(twice=twice, momentum=momentum)
        model(inputs).sum().backward()
        assert model.norm.num_batches_tracked == torch.tensor(1 + twice)
        moved[twice, momentum] = model.norm.running_var
    as_one, one, halves, other = moved.values()
    torch.testing.assert_close(as_one, one)
    torch.testing.assert_close(halves, other)


def test_a_checkpointed_part_costs_fedtan_one_more_exchange_and_no_bits() -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    split = inputs, (inputs[:, 0] > 0).long()
    weights = []
    for twice, exchanges in ((False, 2), (True, 3)):
        torch.manual_seed(0)
        made = run(
            "fedtan",
            model=Checkpointed(twice=twice),
            data=(split, split),
            rounds=1,
            clients=2,
            engine="inprocess",
        )
        assert made.summaries[0]["exchanges"] == exchanges
        weights.append(made.model().state_dict()["last.weight"])
    assert torch.equal(weights[0], weights[1])


def test_frozen_parameters_do_not_freeze_statistics() -> None:
    layer = nn.BatchNorm1d(1).requires_grad_(False)
    layer(torch.ones(4, 1))
    assert layer.running_mean != 0
    layer.eval()
    nn.Sequential(layer).train()
    assert layer.training


def test_average_of_weights_follows_buffers() -> None:
    model = Net()
    average: Any = AveragedModel(model)
    model.bn1(torch.randn(3, 4, 2, 2))
    average.update_parameters(model)
    assert model.bn1.running_mean is not None
    assert torch.equal(average.module.bn1.running_mean, model.bn1.running_mean)


def test_half_precision_ends_there() -> None:
    assert torch.tensor(65_504.0).half().isfinite()
    assert torch.tensor(65_520.0).half().isinf()
    assert torch.tensor(2e-8).half() == 0


NETWORKS = {
    "torchvision `resnet18`": torchvision.models.resnet18,
    "timm `resnet50`": lambda: timm.create_model("resnet50"),
    "timm `efficientnet_b0`": lambda: timm.create_model("efficientnet_b0"),
    "torchvision `mobilenet_v2`": torchvision.models.mobilenet_v2,
    "torchvision `densenet121`": torchvision.models.densenet121,
    "torchvision `efficientnet_b0`": torchvision.models.efficientnet_b0,
    "torchvision `vgg11_bn`": torchvision.models.vgg11_bn,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_and_names(name: str) -> None:
    with torch.device("meta"):
        network = NETWORKS[name]()
    layers = [key for key, module in network.named_modules() if isinstance(module, _BatchNorm)]
    named = [key for key in layers if "bn" in key]
    assert f"| {name} | {len(layers)} | {len(named)} |" in PAGE


def test_networks_without_bn_and_detectors_with_a_frozen_one() -> None:
    with torch.device("meta"):
        for make in (
            torchvision.models.convnext_tiny,
            torchvision.models.swin_t,
            torchvision.models.vit_b_16,
            lambda: timm.create_model("nf_resnet50"),
        ):
            assert not any(isinstance(module, _BatchNorm) for module in make().modules())
    frozen = torchvision.ops.FrozenBatchNorm2d(3)
    assert not isinstance(frozen, _BatchNorm)


def test_flowers_strategies_are_the_table_that_is_tested() -> None:
    tested = import_module("tests.doctor.test_doctor").FLOWER
    rows = re.findall(r"^\| (`[^|]*) \| [^|]*\|$", PAGE[PAGE.index("| strategies |") :], re.M)
    written = re.findall("`([A-Za-z]+)`", " ".join(rows))
    assert set(tested) <= set(written)


@pytest.mark.slow
def test_the_detector_says_what_the_page_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APPS))
    monkeypatch.chdir(APPS)
    examined = import_module("tests.doctor.test_doctor").examined
    page = " ".join(PAGE.split())
    for name, finding in (("detector", "averaged"), ("detector_copy", "copy-without-statistics")):
        (said,) = (each for each in examined(name).findings if each.name == finding)
        assert f"{said.level}: {str(said).partition(' Copy the')[0]}" in page


def test_a_secure_sum_cuts_what_it_sends() -> None:
    defaults = inspect.signature(SecAggPlusWorkflow).parameters
    weighted = np.array([39.0, 41.0]) * 200 / defaults["max_weight"].default
    limit = defaults["clipping_range"].default
    (sent,) = quantize([weighted], limit, 2**22)
    assert sent[0] < 2**22 == sent[1]
