"""Statistics gathered from clients: HeteroFL's static BN, and HBN."""

from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.strategies import HBN, CannotTrainError, FedAvg, HeteroFL
from tests.helpers.engine_comparison import quiet
from tests.helpers.faults import FAULTY, FaultyReply
from tests.helpers.harness import (
    INSTRUCTION,
    SIZES,
    Federation,
    Traffic,
    make_float32_model,
    make_model,
    make_split,
    parts,
)
from tests.helpers.references import pooled_moments


def layers(model: nn.Module) -> nn.Sequential:
    net = model.net
    assert isinstance(net, nn.Sequential)
    return net


def trained(strategy: FedAvg, kind: str, rounds: int = 2, **instruction: Any) -> tuple[nn.Module, state.State]:
    """A model with the final state; `evaluate_every` makes every round count."""
    nodes = Federation(make_model(kind))
    final = nodes.run(strategy, rounds, **instruction)
    model = make_model(kind)
    model.load_state_dict(final)
    return model, final


def test_gathered_equals_the_pooled_statistics_of_what_was_seen() -> None:
    """Full batches, so that what every node's layers see can be computed in one pass a node."""
    model, final = trained(HeteroFL(), "static-bn", batch_size=100)
    net, split = layers(model), make_split()
    seen: dict[int, list[torch.Tensor]] = {1: [], 4: []}
    with torch.no_grad():
        for samples in parts(SIZES):
            values = split.inputs[torch.from_numpy(samples)].double()
            for index, layer in enumerate(net):
                if index in seen:
                    seen[index].append(values)
                values = layer.train()(values)
    for index, pieces in seen.items():
        mean, variance = pooled_moments(torch.cat(pieces))
        assert torch.allclose(final[f"net.{index}.running_mean"], mean, atol=1e-10)
        assert torch.allclose(final[f"net.{index}.running_var"], variance, atol=1e-10)


def gathering(nodes: Federation) -> list[Message]:
    """Return the messages that asked nodes for statistics."""
    assert isinstance(nodes.grid, Traffic)
    return [message for message in nodes.grid.sent if message.metadata.message_type == wire.GATHER]


def test_nodes_that_did_not_train_gather_as_well() -> None:
    nodes, strategy = Federation(make_model("static-bn"), grid=Traffic), HeteroFL(fraction_train=0.5)
    nodes.run(strategy, 1)
    assert len(strategy.training.replies) == 2
    asked = [message.metadata.dst_node_id for message in gathering(nodes)]
    assert sorted(asked) == sorted(nodes.grid.get_node_ids())


def test_hbn_gathers_without_sending_a_mix_to_nodes_that_have_one() -> None:
    nodes = Federation(make_model("hbn"), grid=Traffic)
    nodes.run(HBN(), 2)
    sent = gathering(nodes)
    assert len(sent) == 2 * len(SIZES)
    assert not any(name.endswith("mix") for message in sent[len(SIZES) :] for name in message.content[wire.ARRAYS])


def test_nodes_do_not_send_statistics_that_training_does_not_change() -> None:
    strategy = HeteroFL()
    model = Federation(make_model("static-bn")).run(strategy, 1)
    for reply in strategy.training.replies:
        assert reply.arrays.keys() == {name for name in model if name.endswith(("weight", "bias"))}


def test_gathering_happens_only_where_it_is_evaluated() -> None:
    _, early = trained(HeteroFL(evaluate_every=2), "static-bn", rounds=1)
    _, late = trained(HeteroFL(evaluate_every=10), "static-bn", rounds=2)
    fresh = make_model("static-bn").state_dict()
    assert not torch.equal(early["net.1.running_mean"], fresh["net.1.running_mean"])  # the last round
    assert not torch.equal(late["net.1.running_mean"], fresh["net.1.running_mean"])
    strategy, nodes = HeteroFL(evaluate_every=10), Federation(make_model("static-bn"))
    strategy.num_rounds, strategy.started = 20, True
    messages = strategy.configure_train(1, nodes.initial, INSTRUCTION.to_config(), nodes.grid)
    merged, _ = strategy.aggregate_train(1, nodes.grid.send_and_receive(messages))
    assert merged is not None
    assert not merged["net.1.running_mean"].numpy().any()


@pytest.mark.parametrize(
    ("options", "counted"), [({}, 20 + 64), ({"gather_samples": 30}, 20 + 30), ({"gather_samples": 0}, 20 + 70)]
)
def test_hbn_gathers_up_to_so_many_samples_of_each_node(options: dict[str, Any], counted: int) -> None:
    nodes = Federation(make_model("hbn"), (20, 70), grid=Traffic)
    nodes.run(HBN(min_available_nodes=2, **options), 1)
    records = [reply.content.array_records for reply in nodes.grid.replies]  # type: ignore[attr-defined]
    gathered = [record[wire.MOMENTS] for record in records if wire.MOMENTS in record]
    assert sum(float(record["net.1/count"].numpy()) for record in gathered) == counted * 16  # positions


# ---- a node whose moments overflow ----------------------------------------------------------------------------------


def large_mean(reply: Message) -> Message:
    """Say means that float64 can square, as moments travel, and the model's float32 cannot."""
    values = reply.content.array_records[wire.MOMENTS]
    changed = {name: Array(array.numpy() * 0 + 1e20) for name, array in values.items() if name.endswith("/mean")}
    reply.content[wire.MOMENTS] = ArrayRecord({**values, **changed})
    return reply


class LargeMean(FaultyReply):
    message_type, fault = wire.GATHER, staticmethod(large_mean)


def without_moments(reply: Message) -> Message:
    del reply.content[wire.MOMENTS]
    return reply


class WithoutMoments(FaultyReply):
    message_type, fault = wire.GATHER, staticmethod(without_moments)


@pytest.mark.parametrize(("strategy", "kind"), [(HBN, "hbn"), (HeteroFL, "static-bn")])
def test_moments_that_overflow_the_models_numbers_are_left_out(
    strategy: type[FedAvg], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    after = Federation(make_float32_model(kind), grid=LargeMean).run(strategy(), 2)
    named = [text for text in caplog.messages if "is left out of this round" in text]
    reason = "the statistics of BN layer '1' is too large to be pooled in float32"
    assert set(named) == {f"Node {FAULTY} is left out of this round: {reason}"}
    others = Federation(make_float32_model(kind), grid=WithoutMoments).run(strategy(), 2)
    assert all(torch.equal(after[name], others[name]) for name in others)


def test_where_no_moments_can_be_pooled_the_run_says_why() -> None:
    with pytest.raises(CannotTrainError, match=r"no node could gather BN statistics: node 1001: .* is too large"):
        Federation(make_float32_model("hbn"), (0, 20), grid=LargeMean).run(quiet(HBN), 1)
