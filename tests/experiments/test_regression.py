"""Float targets: the error on the test data, by every method and engine, against torch by hand."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from fedbn_flwr import compare, run
from fedbn_flwr.data import Data, Split
from fedbn_flwr.experiments import UsageError

pytestmark = pytest.mark.usefixtures("registered")
N, TEST = 96, 40
INPUTS = torch.randn(N + TEST, 3, generator=torch.Generator().manual_seed(0))
SUMS = (INPUTS.sum(1) + 1.5).unsqueeze(1).repeat(1, 2) * torch.tensor([1.0, -0.5])
SMALL: dict[str, Any] = {
    "rounds": 4,
    "clients": 3,
    "local_steps": 3,
    "batch_size": 8,
    "evaluate_every": 2,
}
SMALL |= {"device": "cpu", "progress": False, "lr": 0.05, "partition": "iid"}
#: outputs and targets: one number for each sample in both shapes, two numbers, one in another shape
#: than the model's
SHAPES = {"(n,)": SUMS[:, 0], "(n, 1)": SUMS[:, :1], "(n, 2)": SUMS}


def net(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


def half_squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half of each sample's squared error."""
    return ((outputs - targets) ** 2).flatten(1).sum(1) / 2


def own(targets: Tensor = SUMS) -> Any:
    return (INPUTS[:N], targets[:N]), (INPUTS[N:], targets[N:].numpy())


def domains() -> Data:
    """Return three domains of other targets, of whose last there are no test samples."""
    numbers = torch.arange(N + TEST) % 3
    targets = SUMS[:, 0] + 5.0 * numbers
    test = torch.arange(N, N + TEST)[numbers[N:] < 2]
    train, held = (
        Split(INPUTS[rows], targets[rows], numbers[rows]) for rows in (torch.arange(N), test)
    )
    return Data("domains", train, held, 1, ("a", "b", "c"), task="regression")


def error_of(model: nn.Module, data: Any, function: Any = F.mse_loss) -> float:
    """Return the error on the test data, normalized as training is."""
    inputs = (INPUTS - INPUTS[:N].mean(0)) / INPUTS[:N].std(0, correction=0)
    targets = torch.as_tensor(data[1][1])
    with torch.no_grad():
        return float(function(model(inputs[N:]).reshape(targets.shape), targets).mean())


@pytest.mark.parametrize(
    ("shape", "objective", "function"),
    [("(n,)", "mse", F.mse_loss), ("(n, 1)", "mae", F.l1_loss), ("(n, 2)", "mse", F.mse_loss)],
)
def test_the_score_is_the_error_on_the_test_data(shape: str, objective: str, function: Any) -> None:
    data = own(SHAPES[shape])
    found = run("fedavg", model=net, data=data, objective=objective, **{**SMALL, "partition": ""})
    (summary,) = found.summaries
    assert summary["partition"] == "iid"
    assert summary["metric"] == objective
    assert (
        summary[objective]
        == summary["loss"]
        == pytest.approx(error_of(found.model(), data, function), rel=1e-5)
    )
    assert not {"accuracy", "accuracy-personal", "absent-classes"} & summary.keys()
    assert list(found.curves().values()) == [
        {2: found.curves()["fedavg", 0][2], 4: summary[objective]}
    ]


def noisy() -> Any:
    """Return noisy images and, as targets, what they were."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.rand(60, 1, 8, 8, generator=generator)
    inputs = clean + torch.randn(60, 1, 8, 8, generator=generator) / 4
    return (inputs[:40], clean[:40]), (inputs[40:], clean[40:])


def denoiser() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1)
    )


@pytest.mark.slow
def test_targets_may_be_images() -> None:
    data = noisy()
    torch.manual_seed(0)
    options = {**SMALL, "model": denoiser(), "objective": "mse", "rounds": 20, "lr": 0.3}
    methods = ["fedavg", "fixbn", "fedtan", "fedbn"]
    stacked = compare(methods, data=data, **options)
    alone = compare(methods, data=data, engine="inprocess", **options)
    for one, other in zip(stacked.summaries, alone.summaries, strict=True):
        assert one["mse"] == pytest.approx(other["mse"], rel=1e-4)
    inputs = (data[1][0] - data[0][0].mean()) / data[0][0].std(correction=0)
    with torch.no_grad():
        error = F.mse_loss(stacked.model("fedavg")(inputs), data[1][1])
    assert stacked.summaries[0]["mse"] == pytest.approx(float(error), rel=1e-5)
    # what the mean of all pixels would have
    assert float(error) < float(data[1][1].var()) / 1.2
    for changed, reason in (
        ({"augmentation": "flip-rotate"}, "augmentation 'flip-rotate' would change the images"),
        ({"image_size": 16}, "image-size would scale the images and not their float targets"),
    ):
        with pytest.raises(UsageError, match=reason):
            run("fedavg", data=data, **{**options, **changed})


def test_a_function_of_ones_own() -> None:
    data = own()
    found = run("fedavg", model=net, data=data, objective=half_squared, **SMALL)
    assert found.summaries[0]["metric"] == "loss"
    assert found.summaries[0]["loss"] == pytest.approx(
        error_of(found.model(), data, half_squared), rel=1e-5
    )
    # of two numbers, half of the sum of squares is their mean
    same = run("fedavg", model=net, data=data, objective="mse", **SMALL)
    named = run(
        "fedavg", model=net, data=data, objective=f"{__name__}:half_squared", **SMALL, workers=2
    )
    for other in (same, named):
        states = [results.model().state_dict() for results in (found, other)]
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[1][name])
    # and in the place of the cross entropy, where accuracy stays the score
    labels = torch.arange(N + TEST) % 4
    classes = (INPUTS[:N], labels[:N]), (INPUTS[N:], labels[N:])
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    plain, given, other = (
        run("fedavg", model=net, data=classes, **SMALL, **options)
        for options in ({}, {"objective": F.cross_entropy}, {"objective": smooth})
    )
    assert given.summaries[0]["metric"] == "accuracy"
    assert given.summaries[0]["train-loss"] == pytest.approx(
        plain.summaries[0]["train-loss"], rel=1e-5
    )
    assert other.summaries[0]["train-loss"] != pytest.approx(
        plain.summaries[0]["train-loss"], rel=1e-3
    )


METHODS = [
    "fedavg",
    "scaffold",
    "fixbn:freeze-round=2",
    "fedtan",
    "fedtan:carry=true",
    "feddna",
    "fedbs",
    "fedbn",
]
METHODS += ["hbn", "centralized", "fedavg+gn", "fedtan:statistics=exact", "fedbn:statistics=own"]


def test_every_method_learns_and_engines_agree() -> None:
    options = {
        **SMALL,
        "rounds": 5,
        "model": net,
        "data": own(),
        "objective": "mse",
        "local_steps": 2,
    }
    stacked, single = (
        compare(METHODS, **options, engine=engine) for engine in ("stacked", "inprocess")
    )
    assert not stacked.failures
    for one, other in zip(stacked.summaries, single.summaries, strict=True):
        assert one["mse"] == pytest.approx(other["mse"], rel=1e-3), one["method"]
    for key, losses in stacked.curves("train-loss").items():
        assert losses[5] < losses[1], key


def test_what_cannot_be_stacked_trains_one_after_another() -> None:
    def clipped(outputs: Tensor, targets: Tensor) -> Tensor:
        return (
            F.mse_loss(outputs, targets) if float(outputs.detach().mean()) < 1e9 else outputs.sum()
        )

    given = [
        run("fedavg", model=net, data=own(), objective=loss, **SMALL) for loss in (clipped, "mse")
    ]
    assert given[0].summaries[0]["loss"] == pytest.approx(given[1].summaries[0]["mse"], rel=1e-4)
    with pytest.raises(
        UsageError,
        match="the objective 'clipped' stays in this process, so workers and side-by-side must be "
        "1",
    ):
        run("fedavg", model=f"{__name__}:net", data=own(), objective=clipped, **SMALL, workers=2)


OWN = [f"{method}:statistics=own" for method in ("fedbn", "mtfl", "fednorm")]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fednorm", *OWN])
def test_domains_have_errors_of_their_own(method: str) -> None:
    data = domains()
    found = run(
        method,
        model=net,
        data=data,
        objective="mse",
        **{**SMALL, "partition": ""},
        fraction_evaluate=1.0,
    )
    (summary,) = found.summaries
    assert summary["partition"] == "domain"
    own_models = found.models() if method != "fedavg" else dict.fromkeys("abc", found.model())
    inputs = (data.test.inputs - INPUTS[:N].mean(0)) / INPUTS[:N].std(0, correction=0)
    errors, assigned = {}, data.test.domains
    assert assigned is not None
    for number, name in enumerate("ab"):
        rows = assigned == number
        with torch.no_grad():
            errors[name] = float(
                F.mse_loss(own_models[name](inputs[rows])[:, 0], data.test.labels[rows])
            )
        assert summary["domain-mse"][name] == pytest.approx(errors[name], rel=1e-5)
    with torch.no_grad():
        whole = [
            float(F.mse_loss(model(inputs)[:, 0], data.test.labels))
            for model in own_models.values()
        ]
    assert summary["mse"] == pytest.approx(np.mean(whole), rel=1e-5)
    # the third client's domain is not tested: all of them count for it
    assert summary["mse-personal"] == pytest.approx(
        np.mean([errors["a"], errors["b"], whole[2]]), rel=1e-5
    )


@pytest.mark.parametrize("more", [{}, {"stop_after": 1, "evaluate_every": 1}])
def test_an_error_that_is_not_finite_is_no_result(more: dict[str, Any]) -> None:
    """Whether a run comes to its last round or ends early; its square is beyond float32."""
    train, (inputs, targets) = own()
    data = train, (inputs, targets + 1e25)
    given = {**SMALL, "model": net, "objective": "mse", **more}
    results = compare(["fedavg"], data=data, **given)
    (failure,) = results.failures.values()
    assert "the model's mse is inf; the learning rate is" in failure
    assert set(results.rows["state"]) == {"failed"}


def test_held_out_data_and_an_early_end() -> None:
    options = {**SMALL, "model": net, "data": own(), "objective": "mse", "validation": 0.25}
    options |= {"evaluate_every": 1, "rounds": 12}
    whole = run("fedavg", **options).curves()["fedavg", 0]
    best = min(whole, key=lambda number: whole[number])
    target = whole[best // 2]
    stopped = run("fedavg", **options, stop_at=target).summaries[0]
    assert (
        stopped["stopped-after"]
        == next(number for number, error in whole.items() if error <= target)
        < 12
    )
    assert whole[1] > whole[12]
    assert (
        "stopped-after" not in run("fedavg", **options, lr_schedule="", stop_after=11).summaries[0]
    )
    # an error is no share, and every one here is below 80
    assert run("fedavg", **options, stop_at=80).summaries[0]["stopped-after"] == 1


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_several_labels_a_sample_have_an_area_each(method: str) -> None:
    targets = torch.stack([INPUTS[:, 0] > 0, INPUTS.sum(1) > 1, INPUTS[:, 2] > 9], dim=1).float()
    splits = [Split(INPUTS[rows], targets[rows]) for rows in (slice(N), slice(N, N + TEST))]
    names = ("left", "right", "nobody")
    data = Data("labels", splits[0], splits[1], 3, class_names=names, task="regression")
    options = {**SMALL, "objective": "bce", "class_metrics": "auc", "lr": 1.0, "seed": 1}
    found = run(method, model=net, data=data, **options)
    models = found.models() if method == "fedbn" else {"": found.model()}
    areas, errors = [], []
    for model in models.values():
        with torch.no_grad():
            outputs = model(found.preprocess()(splits[1].inputs))
        columns = zip(splits[1].labels.T[:2], outputs.T, strict=False)
        areas.append([roc_auc_score(*pair) for pair in columns])
        errors.append(float(F.binary_cross_entropy_with_logits(outputs, splits[1].labels)))
    (summary,) = found.summaries
    assert summary["bce"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert list(summary["class-auc"]) == ["left", "right"]  # nobody has the last label
    assert [*summary["class-auc"].values()] == pytest.approx(np.mean(areas, axis=0), abs=1e-6)
    assert min(summary["class-auc"].values()) > 0.8


def test_one_label_a_sample_has_an_area_whatever_the_shapes() -> None:
    targets = (INPUTS[:, 0] > 0).float()
    data = (INPUTS[:N], targets[:N]), (INPUTS[N:], targets[N:, None])
    options = {**SMALL, "objective": "bce", "class_metrics": "auc", "lr": 1.0}
    model = nn.Sequential(net(1), nn.Flatten(0))
    (summary,) = run("fedavg", model=model, data=data, **options).summaries
    assert summary["class-auc"]["0"] > 0.9


GOOD = {"data": own(), "objective": "mse"}
ABSENT = Split(INPUTS[:N], SUMS[:N])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**GOOD, "objective": ""},
            "own data has float targets, which need objective=mse, mae, bce or package.module:funct",
        ),
        (
            {**GOOD, "objective": "msa"},
            "unknown objective 'msa'; known: mse, mae, bce, or package.module:function",
        ),
        (
            {**GOOD, "objective": "huber"},
            "unknown objective 'huber'; known: mse, mae, bce, or package.module:function",
        ),
        (
            {**GOOD, "objective": "nowhere.at:all"},
            "objective 'nowhere.at:all': cannot import 'nowhere.at'",
        ),
        (
            {**GOOD, "objective": lambda outputs, _: outputs.nothing},
            "objective '<lambda>' fails for the outputs of the model: 'Tensor",
        ),
        (
            {**GOOD, "objective": lambda *_: 1.0},
            "objective '<lambda>' fails for the outputs of the model: 'float' o",
        ),
        ({**GOOD, "model": lambda: net(3)}, "model '<lambda>' has 3 outputs for 2 targets"),
        ({**GOOD, "model": lambda: net(1)}, "model '<lambda>' has 1 outputs for 2 targets"),
        (
            {**GOOD, "partition": "classes:2"},
            "own data has float targets and no labels: take iid, city, domain or union",
        ),
        ({**GOOD, "partition": "dirichlet:1"}, "own data has float targets and no labels"),
        ({**GOOD, "partition": "shards:2"}, "own data has float targets and no labels"),
        (
            {**GOOD, "class_metrics": "auc"},
            "class-metrics=auc is of targets that are 0 or 1, and own data has others",
        ),
        (
            {**GOOD, "class_metrics": "f1"},
            "class-metrics are of classes, and own data has float targets",
        ),
        (
            {**GOOD, "classes": "a,b"},
            "own data: its classes have no names, so they cannot be numbered by name",
        ),
        (
            {**GOOD, "data": "digits"},
            "objective 'mse' is for float targets, not for classification",
        ),
        (
            {**GOOD, "data": own(SUMS * torch.inf)},
            "own data: training sample 0 has a value that is not a finite number",
        ),
        (
            {**GOOD, "data": (own()[0], own(SUMS[:, 0])[1])},
            "own data: labels of 2 for regression cannot be (40,), torch",
        ),
        (
            {**GOOD, "data": lambda: Data("mine", ABSENT, ABSENT, 2)},
            "mine: labels of 2 for classification cannot be (",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        run("fedavg", **{**SMALL, "model": net, **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
