"""The three accuracies of methods with personal BN, by hand from the nodes' models."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, RecordDict
from safetensors.torch import load_file
from torch import Tensor
from torchmetrics.functional.classification import multiclass_jaccard_index

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.training import logits_of
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.data import Data, load
from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.experiments import Config
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.experiments.output.scoring import Scorer, score_nodes
from fedbn_flwr.models import build
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedAvg, FedBN, NodeReply
from fedbn_flwr.wire import Instruction
from tests.helpers.image_sets import write_cityscapes
from tests.helpers.runs import run, run_in
from tests.helpers.toys import CLASSES, toy_cnn, toy_split

NODES = 3
#: two samples of every class in each of two domains
TEST_DOMAINS = [0] * 8 + [1] * 8
#: node 0 has domain 0, node 1 domain 1, node 2 both, three to one
PARTS = [[0, 1, 2, 3, 4, 5], [12, 13, 14, 15], [8, 9, 10, 16]]
TRAIN_DOMAINS = [0] * 12 + [1] * 12


def federate(
    strategy: FedAvg, rounds: int = 2, losses: bool = False
) -> tuple[dict[str, Any], InProcessGrid, ArrayRecord, Data]:
    """Train three nodes; return the score of the last round, and what is needed to check it."""
    data = Data(
        "toy",
        toy_split(24, domains=TRAIN_DOMAINS),
        toy_split(16, 1, domains=TEST_DOMAINS),
        CLASSES,
        ("first", "second"),
    )
    model = toy_cnn()

    def client(context: Context) -> BNClient:
        index = int(context.node_config["partition-id"])
        return BNClient(
            model,
            data.train,
            test=data.test,
            num_classes=CLASSES,
            indices=torch.tensor(PARTS[index]).numpy(),
            partition_id=index,
            memory=context.state,
            device="cpu",
        )

    grid, scorer, seen = InProcessGrid(client_app(client), NODES), Scorer(worked_with(data)), []
    strategy.start(
        grid,
        state.to_record(toy_cnn().state_dict()),
        rounds,
        train_config=Instruction(local_steps=4, batch_size=4, lr=0.05).to_config(),
        evaluate_config=Instruction(seed=0, report_loss="local-loss" if losses else "").to_config(),
        evaluate_fn=lambda _, arrays: seen.append((arrays, scorer.score(strategy, arrays))),
    )
    arrays, scores = seen[-1]
    return scores, grid, arrays, data


def worked_with(data: Data, *trained: Any) -> Material:
    """Return what a run on these data works with, which measures the loss on the samples that
    clients have.
    """
    return Material(
        Config().but(train_loss_global=bool(trained)), data, trained, toy_cnn(), torch.device("cpu")
    )


def right(values: state.State, data: Data) -> Tensor:
    """Which test samples a model gets right."""
    model = toy_cnn()
    model.load_state_dict(values)
    with torch.no_grad():
        predicted = model.eval()(data.test.batch(torch.arange(len(data.test)))[0]).argmax(1)
    hits: Tensor = predicted == data.test.labels
    return hits.double()


def own_models(grid: InProcessGrid, arrays: ArrayRecord) -> list[dict[str, Tensor]]:
    """The global state with what each node holds in its context."""
    contexts = [grid.context(node).state.array_records for node in grid.get_node_ids()]
    return [
        {**state.from_record(arrays), **state.from_record(records[f"fedbn-flwr/{wire.STAYS}"])}
        for records in contexts
    ]


def test_fedbns_three_accuracies_and_the_matrix_by_hand() -> None:
    scores, grid, arrays, data = federate(FedBN(mean_personal=True, min_available_nodes=NODES))
    nodes = own_models(grid, arrays)
    hits = [right(values, data) for values in nodes]
    assert len({tuple(hit.tolist()) for hit in hits}) > 1
    assert scores["accuracy"] == pytest.approx(sum(float(hit.mean()) for hit in hits) / NODES)

    matrix = [[float(hit[:8].mean()), float(hit[8:].mean())] for hit in hits]
    assert scores["node-domain-accuracy"] == [pytest.approx(row) for row in matrix]
    personal = [matrix[0][0], matrix[1][1], 0.75 * matrix[2][0] + 0.25 * matrix[2][1]]
    assert scores["accuracy-personal"] == pytest.approx(sum(personal) / NODES)
    # most of node 2's samples are of the first domain
    first, second = (matrix[0][0] + matrix[2][0]) / 2, matrix[1][1]
    assert scores["domain-accuracy"] == pytest.approx({"first": first, "second": second})

    total = sum(map(len, PARTS))
    averaged = dict(nodes[0])
    for name, value in averaged.items():
        if name.startswith("1.") and value.is_floating_point():
            weighted = [
                len(part) / total * values[name] for part, values in zip(PARTS, nodes, strict=True)
            ]
            averaged[name] = torch.stack(weighted).sum(0)
    assert scores["accuracy-mean-bn"] == pytest.approx(
        float(right(averaged, data).mean()), abs=1e-9
    )


def loss_of(values: state.State, data: Data, indices: list[int]) -> float:
    """Return a model's mean loss, one training sample after another."""
    model = toy_cnn()
    model.load_state_dict(values)
    with torch.no_grad():
        each = [data.train.batch(torch.tensor([index])) for index in indices]
        return sum(float(F.cross_entropy(model.eval()(x), y)) for x, y in each) / len(indices)


def test_the_training_loss_of_personal_models_is_the_mean_of_each_on_its_own_data() -> None:
    scores, grid, arrays, data = federate(FedBN(min_available_nodes=NODES), losses=True)
    losses = [
        loss_of(values, data, part)
        for values, part in zip(own_models(grid, arrays), PARTS, strict=True)
    ]
    assert scores["train-loss-global"] == pytest.approx(sum(losses) / NODES, rel=1e-5)
    without, *_ = federate(FedBN(min_available_nodes=NODES), rounds=1)
    assert not {"train-loss-global", "accuracy-mean-bn"} & set(without)
    assert {"accuracy", "accuracy-personal", "loss", "node-domain-accuracy"} <= set(without)


def test_the_training_loss_of_a_global_model_is_that_on_all_clients_samples() -> None:
    _, _, arrays, data = federate(FedAvg(fraction_evaluate=0.0, min_available_nodes=NODES))
    everything = [index for part in PARTS for index in part]
    scorer = Scorer(worked_with(data, np.array(everything)))
    found = scorer.score(FedAvg(), arrays)["train-loss-global"]
    assert found == pytest.approx(loss_of(state.from_record(arrays), data, everything), rel=1e-5)
    assert "train-loss-global" not in Scorer(worked_with(data)).score(FedAvg(), arrays)


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_metrics_of_each_class_are_of_one_model_or_means_over_personal_models(
    method: str, tmp_path: Path
) -> None:
    given = {
        "method": method,
        "dataset": "digits",
        "class-metrics": "recall",
        "results_dir": str(tmp_path),
    }
    assert run("run", **given) == 0
    summary = json.loads((run_in(tmp_path) / "summary.json").read_text())
    counts = np.bincount(load("digits").test.labels)
    recalls = [summary["class-recall"][str(number)] for number in range(len(counts))]
    # the classes' recalls, by their shares, are the accuracy
    assert np.average(recalls, weights=counts) == pytest.approx(summary["accuracy"])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_global_model_has_a_personal_accuracy_too_where_nodes_evaluate_it(share: float) -> None:
    scores, _, arrays, data = federate(FedAvg(fraction_evaluate=share, min_available_nodes=NODES))
    hit = right(state.from_record(arrays), data)
    first, second = float(hit[:8].mean()), float(hit[8:].mean())
    assert scores["accuracy"] == pytest.approx(float(hit.mean()))
    assert scores["domain-accuracy"] == pytest.approx({"first": first, "second": second})
    personal = (first + second + 0.75 * first + 0.25 * second) / NODES
    assert scores.get("accuracy-personal") == (pytest.approx(personal) if share else None)


def replies(rows: Iterable[tuple[float, float, list[float] | float]]) -> list[NodeReply]:
    return [
        NodeReply(
            node=node,
            partition=node,
            num_examples=1 + node,
            metrics={
                wire.ACCURACY: accuracy,
                wire.ACCURACY_PERSONAL: personal,
                wire.EVAL_LOSS: 1.0 + node,
                wire.DOMAIN_SCORES + "accuracy": domains,
                wire.DOMAIN: node,
            },
            records={},
            content=RecordDict(),
        )
        for node, (accuracy, personal, domains) in enumerate(rows)
    ]


def test_without_domains_there_is_no_matrix() -> None:
    assert "node-domain-accuracy" not in score_nodes(
        replies([(0.5, 1.0, [0.5]), (0.25, 0.5, 0.25)])
    )
    assert score_nodes([]) == {}


def test_models_of_nodes_with_several_domains_have_no_score_by_domain(tmp_path: Path) -> None:
    data = "digits-domains"
    given = {"method": "silobn", "dataset": data, "partition": "iid", "rounds": "1"}
    assert run("run", **given, results_dir=str(tmp_path)) == 0
    summary = json.loads((run_in(tmp_path) / "summary.json").read_text())
    assert "domain-accuracy" not in summary
    assert np.shape(summary["node-domain-accuracy"]) == (2, 5)


def test_a_node_whose_scores_cannot_be_read_is_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = replies([(0.5, 1.0, [0.25, 0.75]), (0.0, 0.0, [0.5]), (0.0, 0.0, 0.5)])
    strange: dict[str, Any] = dict(said[0].metrics)
    del strange[wire.ACCURACY]
    said = [*said, replace(said[0], node=3, metrics=strange)]
    assert score_nodes(said, ("first", "second")) == score_nodes(said[:1], ("first", "second"))
    assert [text.split(":")[0] for text in caplog.messages] == [
        f"Node {node} is left out of the scores" for node in (1, 2, 3)
    ]


IMPOSSIBLE: list[tuple[str, Any]] = [
    (wire.EVAL_LOSS, float("inf")),
    (wire.DOMAIN_SCORES + "accuracy", [0.5, 1000.0]),
    (wire.SCORE + "mean-iou-personal", 1000.0),
]
IMPOSSIBLE += [
    (key, value)
    for key in ("accuracy", "accuracy-personal")
    for value in (1000.0, -0.1, float("nan"))
]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_an_impossible_score_is_left_out_by_name(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said = replies([(0.5, 1.0, [0.25, 0.75]), (0.25, 0.5, [0.5, 0.5])])
    lies = [said[0], replace(said[1], metrics={**said[1].metrics, key: value})]
    assert score_nodes(lies, ("first", "second")) == score_nodes(said[:1], ("first", "second"))
    number = value[1] if isinstance(value, list) else value
    assert caplog.messages == [
        f"Node 1 is left out of the scores: its {key.removeprefix('domain-')!r} is {number}"
    ]


def test_a_score_beside_the_accuracy_is_not_the_accuracy() -> None:
    said = replies([(0.5, 1.0, 0.5), (0.25, 0.5, 0.5)])
    more = {wire.SCORE + key: 0.9 for key in ("accuracy", "accuracy-personal", "loss")}
    assert score_nodes(
        [said[0], replace(said[1], metrics={**said[1].metrics, **more})]
    ) == score_nodes(said)


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_in_segmentation_nodes_have_a_mean_iou_on_their_own_city(
    method: str, tmp_path: Path
) -> None:
    data, shared = (
        "streets:cities=2:images=4:test=2",
        {"clients": "2", "rounds": "1", "batch-size": "2"},
    )
    options = {
        **shared,
        "dataset": data,
        "model": "small-fcn",
        "partition": "city",
        "fraction-evaluate": "1",
    }
    assert run("run", **options, method=method, local_steps="1", results_dir=str(tmp_path)) == 0
    summary = json.loads((run_in(tmp_path) / "summary.json").read_text())
    assert 0 < summary["mean-iou-personal"] != summary["mean-iou"]
    by_city = [summary["domain-mean-iou"][name] for name in load(data).domain_names]
    if method == "fedbn":  # the model of a node is not in the folder, but each has a city
        assert summary["mean-iou-personal"] == pytest.approx(sum(by_city) / 2)
        return
    model = build(
        "small-fcn",
        num_classes=5,
        in_channels=3,
        image_size=load(data).image_size,
        norm="bn",
        seed=0,
    )
    model.load_state_dict(load_file(run_in(tmp_path) / "model.safetensors"))
    split = load(data).test
    inputs, targets = split.batch(torch.arange(len(split)))
    with torch.no_grad():
        predicted = logits_of(model.eval()(inputs)).argmax(1)
    cities = [split.domains == city for city in range(2)] if split.domains is not None else []
    own = [
        multiclass_jaccard_index(predicted[here], targets[here], 5, ignore_index=IGNORED)
        for here in cities
    ]
    assert summary["mean-iou-personal"] == pytest.approx(float(sum(own)) / 2, rel=1e-5)
    assert by_city == pytest.approx([float(each) for each in own], rel=1e-5)


@pytest.mark.slow
def test_stacked_clients_segment_streets_from_files_as_each_does_alone(tmp_path: Path) -> None:
    home = write_cityscapes(tmp_path / "streets")
    options = {
        "dataset": f"cityscapes:{home}",
        "image-size": "16",
        "partition": "city",
        "model": "small-fcn",
    }
    how = {"augmentation": "random-crop", "image-workers": "1", "method": "fixbn:freeze-round=1"}
    models, scores = [], []
    for engine in ("inprocess", "stacked"):
        folder = tmp_path / engine
        assert run("run", **options, **how, engine=engine, results_dir=str(folder)) == 0
        models.append(load_file(run_in(folder) / "model.safetensors"))
        scores.append(json.loads((run_in(folder) / "summary.json").read_text()))
    torch.testing.assert_close(models[1], models[0], rtol=1e-4, atol=1e-5)
    assert scores[0]["mean-iou"] == pytest.approx(scores[1]["mean-iou"], abs=0.01)
    assert 0 < scores[0]["mean-iou"] < scores[0]["accuracy"] < 1
    # the cities of training are not tested
    assert scores[0]["domain-mean-iou"] == {"frankfurt": scores[0]["mean-iou"]}
