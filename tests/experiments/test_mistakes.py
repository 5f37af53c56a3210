"""What users get wrong, a table for each door: the command, options and methods, and calls from
Python.

Mistakes in recipes are in `recipes/test_recipe.py`, those of sites in `sites/test_sites_run.py`,
and checkpoints that cannot be used in `test_resume.py`.
"""

import os
import re
from pathlib import Path
from threading import Lock
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from fedbn_flwr import compare
from fedbn_flwr.data import Data, Split
from fedbn_flwr.experiments import UsageError, main, resolve
from fedbn_flwr.norm import NORMS
from fedbn_flwr.strategies import REGISTRY, FedAvg, Privacy
from tests.helpers.runs import DATA, OPTIONS, command

HERE = "tests.helpers.other_shapes"
ROWS = f"--dataset {HERE}:rows_of_numbers --model {HERE}:perceptron"

# ---- the command ---------------------------------------------------------------------------------

#: command, words, what its one line says
COMMANDS: list[tuple[str, str, str]] = [
    ("run", "--dataset folder:/nowhere", "/nowhere is missing: the folder that folder:PATH names"),
    (
        "run",
        f"--dataset {__name__}:flawed",
        "flawed: test sample 7 has a value that is not a finite number",
    ),
    ("run", "--partition classes:9", "classes:9"),
    ("run", "--model nowhere.at:all", "cannot import 'nowhere.at'"),
    ("run", "--image-size 5", "cannot take 5x5 images"),
    (
        "run",
        "--dataset synthetic --channels 4",
        "synthetic: channels=4 repeats grey images, and these have 3",
    ),
    ("run", "--model timm:resnet_18", "timm has no model 'resnet_18'; did you mean 'resnet18'?"),
    (
        "run",
        "--model torchvision:resnet1",
        "torchvision has no model 'resnet1'; did you mean 'resnet1",
    ),
    (
        "run",
        "--learning-rate 0.1",
        "unknown option '--learning-rate'; like it: --lr; all: `fedbn-flwr run --help-all`",
    ),
    (
        "run",
        "--batch 9",
        "unknown option '--batch'; like it: --batch-size; all: `fedbn-flwr run --help-all`",
    ),
    (
        "compare",
        "--methods fedavg --xyzzy",
        "'--xyzzy'; all: `fedbn-flwr compare --help-all`",
    ),
    ("list", "--widgets", "unknown option '--widgets'; known: -h, --help, --plugins, --json"),
    ("run", "--round 5", "unknown option '--round'; did you mean '--rounds'?"),
    ("run", "--freezeround=3", "unknown option '--freezeround'; did you mean '--freeze-round'?"),
    ("run", "--method FedAvg", "unknown strategy 'FedAvg'; did you mean 'fedavg'?"),
    (
        "run",
        "fedbn",
        "'fedbn' is no option: these begin with -- (see `fedbn-flwr run --help`)",
    ),
    ("run", "--engine spark", "unknown engine 'spark'; known: stacked, inprocess, ray"),
    ("run", "--device gpu", "unknown device 'gpu'; known: auto, cpu"),
    ("run", "--device cuda:99", "device 'cuda:99' is not available here"),
    ("run", "--init-from /nowhere.pt", "no file /nowhere.pt"),
    (
        "run",
        f"--init-from {__file__}",
        "test_mistakes.py is neither safetensors nor a torch state dict",
    ),
    (
        "run",
        "--plugins nowhere.methods",
        "plugins: cannot import 'nowhere.methods': No module named 'nowh",
    ),
    ("run", "--plugins", "argument --plugins: expected one argument"),
    ("run", f"--results-dir {__file__}/results", "results-dir"),
    (
        "run",
        "--log-to tensorbord",
        "unknown sink 'tensorbord' in log-to; known: tensorboard, wandb",
    ),
    (
        "run",
        "--engine ray --workers 2",
        "workers=2 only works with the engines 'stacked' and 'inprocess'",
    ),
    (
        "run",
        "--engine ray --state-dir x",
        "state-dir 'x' only works with the engines 'stacked' and 'inprocess'",
    ),
    (
        "run",
        "--method fedavg --freeze-round 0.3",
        "freeze-round is an option of fixbn, centralized; fedavg would",
    ),
    (
        "run",
        "--method fedavg:robust=multi-krum:1",
        "'fedavg:robust=multi-krum:1': robust=multi-krum:1 needs 5 nodes in a round, and 2 take "
        "part: 3 missing",
    ),
    (
        "run",
        "--stop-at 80",
        "stop-at must be at most 1, as accuracy is a share, got 80; 80 % is stop-at=0.8",
    ),
    # a normalizer in place of BN's layers must take all of them over
    (
        "run",
        f"--method fedavg+gn --model {HERE}:warm",
        "is a WarmBatchNorm with temperature, scale, which Group",
    ),
    (
        "run",
        f"--method fedtan --model {HERE}:warm",
        "'1' is a WarmBatchNorm, which computes something else than BN",
    ),
    *(
        (
            "run",
            f"--method {method}",
            f"method '{method}' would be another one: the model has no BN",
        )
        for method in ("fixbn+gn", "feddna:carry=true:norm=ln")
    ),
    *(
        (
            "run",
            f"--method {method} --model {HERE}:functional",
            "would be another one: the model's forward calls F.b",
        )
        for method in ("fedbn", "fedwon", "fedavg+gn")
    ),
    *(
        (
            "run",
            f"--method {method} --model {HERE}:standardized",
            f"method '{method}': layer '0' is a StandardizedConv2d, which standardizes its weight "
            "already",
        )
        for method in ("fedwon", "fedavg+bn-ws", "fedavg+gn-ws")
    ),
    *(
        (
            "run",
            f"--method {method} --model {HERE}:own_norm",
            "would be another one: layer '4', of the class OwnNorm, has running statistics and is "
            "no BN of torch's: derive its class from",
        )
        for method in ("fedbn", "fixbn", "fedtan", "fedwon", "fedavg+gn")
    ),
    (
        "run",
        f"--model {HERE}:growing",
        f"model '{HERE}:growing' changes its entries in its first pass, such as '1.largest'",
    ),
    *(
        (
            "run",
            f"--method {method} --model {HERE}:held",
            f"'{method}': all BN layers are in eval mode in training",
        )
        for method in ("fedtan", "feddna:carry=true")
    ),
    ("diagnose", f"--model {HERE}:held", "all BN layers are in eval mode in training"),
    ("run", f"--model {HERE}:broken", f"model '{HERE}:broken' cannot be made: KeyError: 'width' ("),
    (
        "compare",
        f"--methods fedavg,fedavg+bn-ws --model {HERE}:own_convolution",
        "method 'fedavg+bn-ws': layer '0' computes its weight, which cannot be standardized",
    ),
    (
        "run",
        f"--model {HERE}:failing",
        "of the shape (1, 8, 8): KeyError: 'inputs' (",
    ),
    (
        "compare",
        "--methods fedavg,fedavg:trainable=no.*",
        "method 'fedavg:trainable=no.*': trainable: no parameter",
    ),
    (
        "run",
        f"--model {HERE}:deaf",
        f"model '{HERE}:deaf' cannot take inputs of the shape (1, 8, 8)",
    ),
    ("run", f"--model {HERE}:narrow", f"model '{HERE}:narrow' has 3 outputs for 4 classes"),
    ("run", f"--model {HERE}:frozen", f"model '{HERE}:frozen' has no parameter that learns"),
    (
        "run",
        f"--model {HERE}:with_features",
        "the model returns a tuple, not logits, or an object or a dictionary that has `logits`",
    ),
    ("run", f"--model {HERE}:with_names", "the model returns a dict, not logits"),
    (
        "run",
        "--model math:sqrt",
        "model 'math:sqrt' must need no argument other than num_classes, in_channels, ima",
    ),
    ("run", "--model builtins:dict", "model 'builtins:dict' must need no argument other than"),
    (
        "run",
        "--dataset fashion-mnist:/nowhere",
        "fashion-mnist is not in /nowhere/FashionMNIST/raw or ",
    ),
    ("run", "--dataset fashion-mnist:size=3", "fashion-mnist: unknown option 'size'"),
    (
        "run",
        f"{ROWS} --image-size 8",
        "image-size is for images, not for inputs of the shape (20,)",
    ),
    (
        "run",
        f"{ROWS} --augmentation crop",
        "augmentation 'crop' is for images, not for inputs of the shape (20,)",
    ),
    (
        "run",
        "--dataset streets:cities=2:images=4 --partition city",
        "model 'small-cnn' is for classification, streets for segmentation; there are: small-fcn, "
        "deeplabv3plus-",
    ),
    ("compare", "--methods fedavg --unseen photos", "has no domain 'photos'; it has none"),
    ("compare", "--methods fedavg --unseen each", "has no domain 'each'; it has none"),
    (
        "compare",
        "--methods fedavg --unseen each --dataset fashion-mnist:/nowhere",
        "fashion-mnist is not in /nowhere/",
    ),
    (
        "run",
        "--dataset digits-domains --partition domain --clients 4 --unseen moon",
        "digits-domains has no domain 'moon'; it has real, fonts, photos, inverted, sheared",
    ),
    (
        "run",
        "--dataset sites --unseen real",
        "unseen leaves a domain of one data set out; to leave a site out, do not",
    ),
    ("compare", "--methods fedavg --seeds few", "--seeds must be a whole number, got 'few'"),
    (
        "compare",
        "--methods fedavg --grid 0.1",
        "--grid must be OPTION=VALUE,VALUE, such as lr=0.03,0.1, got ",
    ),
    (
        "compare",
        "--methods fedavg --grid lr=0.1 --grid lr=0.3",
        "--grid names 'lr' twice: write its values with commas",
    ),
    ("compare", "--methods fedavg --grid-seeds 0", "--grid-seeds must be at least 1, got 0"),
    ("compare", "", "--methods"),
    (
        "compare",
        "--methods fedavg --dry-run --device cuda:99",
        "device 'cuda:99' is not available here",
    ),
    (
        "compare",
        "--methods fedbn,fedavg:workers=2 --engine ray",
        "workers=2 only works with the engines",
    ),
    ("compare", "--methods fedavg,fedbn --freeze-round 1", "fedavg, fedbn would ignore it"),
    ("diagnose", "--method fedavg+gn", "the model has no BN layer"),
    ("diagnose", "--method fedavg+brn", "computes something else than BN"),
    ("diagnose", "--batches 0", "--batches must be at least 1, got 0"),
    (
        "reproduce",
        "fixbn/table99",
        "unknown recipe 'fixbn/table99'; `fedbn-flwr recipes` lists them",
    ),
    ("reproduce", "nowhere.yaml", "recipe nowhere: cannot be read"),
    (
        "reproduce",
        "fixbn/table5 --only LN",
        "recipe fixbn/table5 has no 'LN'; it has: Centralized+BN, ",
    ),
    ("reproduce", "fixbn/table5 --side-by-side 0", "--side-by-side must be at least 1, got 0"),
    ("report", "nowhere", "nowhere is missing"),
    ("report", __file__, "test_mistakes.py is not a folder of results"),
    (
        "report",
        str(Path(__file__).parent),
        "holds no results of `fedbn-flwr run`, `compare` or `reproduce`",
    ),
    ("report", "nowhere --format html,latx", "unknown format 'latx'; did you mean 'latex'"),
    ("list", "fixbm", "unknown name 'fixbm'; did you mean 'fixbn'?"),
    ("list", "models all", "'all' is no option"),
    ("compair", "", "unknown command 'compair'; did you mean 'compare'?"),
]


@pytest.mark.parametrize(("name", "words", "message"), COMMANDS)
def test_in_the_command_it_is_one_line_and_exit_code_2_and_leaves_nothing(
    name: str, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    runs = name in ("run", "compare", "diagnose")
    assert (
        main([*(command(name, results_dir=str(folder)) if runs else [name]), *words.split()]) == 2
    )
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert not output.out or name == "diagnose"  # which says first what the data are
    assert line.startswith("fedbn-flwr: ")
    assert message in line
    assert not folder.exists()


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- options and methods -------------------------------------------------------------------------

METHODS, NORMALIZERS = f"; known: {', '.join(REGISTRY)}", f"; known: {', '.join(NORMS)}"
#: a method or options, and a part of the error
RESOLVED: list[tuple[str | dict[str, Any], str]] = [
    ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
    ({"evaluate-every": 0}, "evaluate-every must be at least 1, got 0"),
    ({"fraction-train": 1.5}, "fraction-train must be between 0 and 1, got 1.5"),
    ({"fraction-train": 0}, "fraction-train must be above 0"),
    ({"min-nodes": 4, "clients": 3}, "min-nodes must be at most clients, got 4 of 3"),
    ({"stop-after": -1}, "stop-after must be at least 0, got -1"),
    ({"stop-at": -0.5}, "stop-at must be at least 0, got -0.5"),
    ({"sites": "north,west,west"}, "sites names 'west' twice"),
    ({"sites": "north,west", "clients": 3}, "sites names 2 sites, but clients is 3"),
    (
        {"method": "fedbn", "fraction-evaluate": 0.5},
        "'fedbn': all nodes evaluate, whatever fraction-evaluate says",
    ),
    ({"local-steps": 0}, "one of local-steps and local-epochs must be above 0"),
    ({"optimizer": "lamb"}, "unknown optimizer 'lamb'; known: sgd, adam, adamw"),
    ({"precision": "fp8"}, "unknown precision 'fp8'; known: float32, tf32, bf16"),
    (
        {"augmentation": "mixup"},
        "unknown augmentation 'mixup'; known: none, crop, crop-flip, resized-crop-flip, "
        "flip-rotate, random-crop",
    ),
    (
        {"class-metrics": "f1,f2"},
        "unknown metric 'f2' in class-metrics; known: f1, iou, precision, recall, auc",
    ),
    ({"classes": "a,b,a"}, "classes names 'a' twice"),
    (
        {"dataset": os.fsdecode(b"folder:K\xf6ln")},
        r"dataset must be a text in UTF-8, got 'folder:K\udcf6ln'",
    ),
    ({"mean": "0.5", "std": "wide"}, "std must be a number, got 'wide'"),
    (
        {"mean": "0.5"},
        "mean and std must be given together, and std must be above 0, got mean='0.5' and std=''",
    ),
    ({"norm-options": "r_max"}, "norm-options: 'r_max' is not of the form key=value"),
    ({"norm": "brn", "norm-options": "frobnicate=1"}, "frobnicate"),
    ({"norm": "brn", "norm-options": "groups=2"}, "groups"),
    ("", f"unknown strategy ''{METHODS}"),
    ("fedsgd+gn:lr=1", f"unknown strategy 'fedsgd'{METHODS}"),
    ("fedavg+batch", f"unknown normalizer 'batch'{NORMALIZERS}"),
    ({"norm": "xn"}, f"unknown normalizer 'xn'{NORMALIZERS}"),
    ("fedavg+", f"unknown normalizer ''{NORMALIZERS}"),
    (
        "fixbn:mu=1",
        "method 'fixbn:mu=1': mu is an option of fedbs, fedprox; fixbn would ignore it",
    ),
    ("fed3r:clip_norm=1", "scaffold; fed3r would ignore it"),
    ("fixbn:freeze_rounds=1", "unknown option 'freeze_rounds'; did you mean 'freeze-round'?"),
    (
        "fixbn:method=1",
        "unknown option 'method'; like it: statistics, norm; all: `fedbn-flwr run --help-all`",
    ),
    ("fixbn:learning-rate=1", "unknown option 'learning-rate'; like it: frozen-lr, server-lr"),
    ({"gpu": 1}, "unknown option 'gpu'; like it: precision, device, "),
    (
        {"lrates": 1},
        "unknown option 'lrates'; like it: local-steps, classes; all: `fedbn-flwr run --help-all`",
    ),
    ({"norm-options": (1, 2)}, "norm-options: '1' is not of the form key=value"),
    ({"method": True}, "method must be an object of its kind or text, got True"),
    ("fedavg:plugins=a", "method 'fedavg:plugins=a': unknown option 'plugins'"),
    ("fedavg:=0.1", "'=0.1' is not of the form key=value"),
    ("fedavg:lr:0.1", "'lr:0.1' is not of the form key=value"),
    (
        "fixbn:freeze-round=1:freeze_round=2",
        "method 'fixbn:freeze-round=1:freeze_round=2': 'freeze_round' is given twice",
    ),
    ("fedprox:mu=small", "method 'fedprox:mu=small': mu must be a number, got 'small'"),
    ("fedprox:lr=fast", "method 'fedprox:lr=fast': lr must be a number, got 'fast'"),
    ("fedprox:mu=-1", "method 'fedprox:mu=-1': mu must be at least 0"),
    ("fixbn:freeze=all", "freeze must be statistics, affine or both, got 'all'"),
    ("fixbn:freeze-round=-0.5", "neither a fraction between 0 and 1 nor a number of rounds"),
    ("fedavg:weighting=size", "weighting must be examples or uniform, got 'size'"),
    ("fedavg:lr-schedule=soon", "cannot read 'soon'"),
    ("fedwon:wsconv=false:gain=learnable", "which wsconv=false leaves out"),
    ("fedwon:wsconv=false:branch-scale=paper", "which wsconv=false leaves out"),
    (
        {"method": "fedwon:branch-scale=paper", "norm-options": "branch_scale=1"},
        "branch_scale is 1.0, but method",
    ),
]


@pytest.mark.parametrize(("given", "message"), RESOLVED)
def test_in_an_option_it_is_named_with_what_is_allowed(
    given: str | dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        resolve({"method": given} if isinstance(given, str) else given).make_strategy(5)


# ---- calls from Python ---------------------------------------------------------------------------

X = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3
GOOD = X, Y
FRAME = pd.DataFrame(X.flatten(1).numpy())
BYTES = (X * 30 + 100).to(torch.uint8)


class Locked(nn.Module):
    """A network that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 3)
        self.lock = Lock()


def hooked(num_classes: int) -> nn.Module:
    """Return a model whose gradient is changed."""
    model = nn.Linear(192, num_classes)
    model.weight.register_hook(lambda gradient: gradient / 2)
    return model


class Renamed(nn.Linear):
    """A layer whose entries have other names than its parameters."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the entries."""
        entries = super().state_dict(*args, **options)
        return {f"own.{name}": value for name, value in entries.items()}


class Stateful(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Items(Dataset[Any]):
    """Six times the same item."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> Any:
        return self.item


def spoiled(value: float) -> torch.Tensor:
    images = X.clone()
    images[7, 0, 0, 0] = value
    return images


def flawed() -> Data:
    """Return data with a value that is not a number."""
    return Data("flawed", Split(X, Y), Split(spoiled(float("nan")), Y), 3)


#: methods and options of `compare`, and a part of the error
CALLS: list[tuple[Any, dict[str, Any], str]] = [
    (
        3,
        {},
        "a method must be a name, or a strategy of fedbn_flwr.strategies or a subclass of one, "
        "got builtins.int",
    ),
    ([], {}, "methods must be a list"),
    (["fedavg", FedAvg()], {}, "methods names 'fedavg' twice"),
    (
        [dict],
        {},
        "a method must be a name, or a strategy of fedbn_flwr.strategies or a subclass of one, "
        "got builtins",
    ),
    ([FedAvg(seed=3)], {}, "seed is the same for all methods of a comparison"),
    ([FedAvg(patience=3.0)], {}, "unknown option 'patience'"),
    (
        [FedAvg(weighting="uniform", privacy=Privacy(1, 1))],
        {},
        "FedAvg: an experiment cannot write down privacy=",
    ),
    (["fedavg", "fedavg:model=vgg"], {}, "unknown model 'vgg'"),
    (["fedavg:validation=0.5"], {}, "validation is the same for all methods"),
    (["fedavg"], {"rouns": 3}, "unknown option 'rouns'; did you mean 'rounds'?"),
    (["fedavg"], {"seeds": 0}, "seeds must be at least 1, got 0"),
    (["fedavg"], {"grid": {"lr": 0.1}}, "grid: lr must have a list of at least one value, got 0.1"),
    (["fedavg"], {"grid": {"lr": [0.1]}, "grid_seeds": 0}, "grid_seeds must be at least 1, got 0"),
    (
        ["fedavg"],
        {"grid": {"mu": [1]}},
        "mu is an option of fedbs, fedprox; fedavg would ignore it",
    ),
    (["fedavg"], {"grid": {"seed": [1]}}, "grid: seed is the same for all runs"),
    (["fedavg"], {"grid": {"lr": [0.1, -1]}}, "lr must be at least 0, got -1"),
    (["fedavg"], {"grid": {"lrate": [1]}}, "unknown option 'lrate'"),
    # 80 samples suffice for 80 clients, the four fifths by which values are chosen do not
    (["fedavg"], {"clients": 80, "grid": {"lr": [0.1]}}, "80 clients cannot share 64 samples"),
    (
        ["fedavg"],
        {"grid": [0.1]},
        "grid must be a mapping of options to lists of values, got [0.1]",
    ),
    (
        ["fedavg"],
        {"grid": {"lr": "0.1"}},
        "grid: lr must have a list of at least one value, got '0.1'",
    ),
    (["fedavg"], {"lr": [0.1, 0.3]}, "lr must be a number, got (0.1, 0.3)"),
    (["fedavg"], {"lr": None}, "lr must be a number, got None"),
    (["fedavg"], {"rounds": {"a": 3}}, "rounds must be a whole number, got (('a', 3),)"),
    (
        ["fedavg+brn"],
        {"norm_options": {"r_min": 3}},
        "norm-options of 'brn': unknown option 'r_min'",
    ),
    (["fedavg"], {"resume": "x"}, "compare has no option 'resume'"),
    (
        ["fedavg"],
        {"model": 3},
        "model must be a name, a function or class that makes a torch.nn.Module, or",
    ),
    (
        ["fedavg"],
        {"model": None},
        "model must be a name, a function or class that makes a torch.nn.Module, or",
    ),
    (
        ["fedavg"],
        {"model": nn.LazyLinear(3)},
        "model 'LazyLinear' has lazy layers ('weight' has no",
    ),
    (
        ["fedavg"],
        {"model": nn.Linear(192, 3, device="meta")},
        "model 'Linear' has no values yet ('weight' is on the meta device)",
    ),
    (
        ["fedavg"],
        {"model": Stateful(192, 3)},
        "model 'Stateful' has an entry that is no tensor, and cannot be averaged: '_extra_state', "
        "a dict",
    ),
    *(
        (["fedavg"], {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 4), after)}, text)
        for after, text in (
            (nn.Unflatten(1, (4, 1, 1)), "outputs of the shape (4, 1, 1) for a sample, not (4,)"),
            (nn.Flatten(0), "outputs of the shape () for a sample, not (4,)"),
        )
    ),
    (
        ["fedavg"],
        {"model": hooked},
        "model 'hooked' has a hook on its parameter 'weight', which its copies would lack: change "
        "gradients in a forward",
    ),
    (
        ["fedavg"],
        {"model": Renamed(192, 3)},
        "model 'Renamed' has no parameter 'weight' in its state_dict",
    ),
    (["fedavg"], {"model": Locked()}, "model 'Locked' cannot be copied, so give a function that"),
    (["fedavg"], {"model": lambda: 3}, "model '<lambda>' returned a int, not a torch.nn.Module"),
    (["fedavg"], {"dataset": "digits"}, "data and dataset mean the same"),
]
#: data, and a part of the error
OWN_DATA: list[tuple[Any, str]] = [
    (None, "a function that returns one of these two, got NoneType"),
    (3, "own data must be a name, fedbn_flwr.data.Data, a pair (training data, test data), or a "),
    (([1], [2]), "the training data must be a fedbn_flwr.data.Split, a pair"),
    (GOOD, "a Tensor has no labels: data is "),
    ((FRAME, FRAME), "a DataFrame has no labels: data is "),
    (FRAME, "a function that returns one of these two, got DataFrame"),
    (((FRAME.astype(str), Y), GOOD), "column 0 holds no numbers"),
    (
        ((FRAME.assign(town="here"), Y), GOOD),
        "the training data must be a fedbn_flwr.data.Split, a pair (inputs, lab",
    ),
    (((FRAME.assign(town="here"), Y), GOOD), "column 'town' holds no numbers"),
    (
        (Items((Image.new("L", (8, 8)), 1)), GOOD),
        "items must be (tensor, label), not Image (PILToTensor makes tensors",
    ),
    ((GOOD, Items({"image": X[0], "label": 1})), "the test data must be "),
    (
        (GOOD, Items({"image": X[0], "label": 1})),
        "its items must be (tensor, label), not dict (of a Hugging Face data set, save_to_disk",
    ),
    (((X.to(torch.complex64), Y), GOOD), "or (for ids) int64, not (24, 3, 8, 8), torch.complex64"),
    (
        ((X, Y.to(torch.complex64)), GOOD),
        "labels must be integers, the numbers of classes from 0, or float targets, not "
        "torch.complex64",
    ),
    (
        ((BYTES, Y), (BYTES.float(), Y)),
        "training inputs are torch.uint8, test inputs torch.float32: give both in one",
    ),
    (
        ((BYTES.float(), Y), (BYTES, Y)),
        "training inputs are torch.float32, test inputs torch.uint8",
    ),
    (((X, Y.float()), GOOD), "own data: labels of 1 for regression cannot be (24,), torch.int64"),
    (
        ((X, Y + 1), (X, Y + 1)),
        "labels are 1 to 3, but classes are numbered from 0: give labels - 1",
    ),
    (
        ((X.permute(0, 2, 3, 1), Y), GOOD),
        "(24, 8, 8, 3) look like channels last: give inputs.permute(0, 3, 1, 2)",
    ),
    (((spoiled(float("nan")), Y), GOOD), "training sample 7 has a value that is not a finite"),
    ((GOOD, (spoiled(float("-inf")), Y)), "test sample 7 has a value that is not a finite"),
    (
        (GOOD, (torch.zeros(9, 3, 9, 9), Y[:9])),
        "model 'mlp' cannot take test inputs of the shape (3, 9, 9)",
    ),
    ((GOOD, (X[:0], Y[:0])), "own data has no test samples"),
    (((X, Y * 0), (X, Y * 0)), "own data has one class only, 0"),
    (
        ((X.long(), Y), (X.long(), Y)),
        "cannot take integers (ids: other numbers are float32) of the shape",
    ),
]


def test_says_that_bn_is_in_eval_mode_in_training(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    assert (
        main(
            command(
                "run", model=f"{HERE}:held", method="silobn", results_dir=str(tmp_path), **OPTIONS
            )
        )
        == 0
    )
    assert (
        "all BN layers are in eval mode in training, so they keep their statistics"
        in flower_log.text
    )


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        *CALLS,
        *((["fedavg"], {"data": data, "model": "mlp"}, message) for data, message in OWN_DATA),
    ],
)
def test_in_a_call_it_is_one_line_before_training(
    methods: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    small = {key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "dataset"}
    with pytest.raises(UsageError) as caught:
        compare(methods, folder=tmp_path / "runs", **{**small, "data": DATA, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
