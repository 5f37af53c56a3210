"""A node's own model is the one that it would evaluate."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict

from fedbn_flwr import norm, state
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import export_personal, keep_local
from fedbn_flwr.state.record_files import pack_records, read_records
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedBN, SiloBN
from tests.helpers.harness import Federation, make_model


class Evaluated(Federation):
    """Notes the model with which each node evaluates."""

    def __init__(self, **options: object) -> None:
        self.models: dict[int, state.State] = {}

        def watch(client: BNClient, partition: int) -> BNClient:
            evaluate = client.test

            def test(*received: object) -> object:
                reply = evaluate(*received)  # type: ignore[arg-type]
                self.models[partition] = {
                    name: value.clone() for name, value in client.model.state_dict().items()
                }
                return reply

            client.test = test  # type: ignore[method-assign, assignment]
            return client

        super().__init__(make_model(), wrap=watch, **options)  # type: ignore[arg-type]

    def contexts(self) -> list[Context]:
        return [self.grid.context(node) for node in self.grid.get_node_ids()]


@pytest.mark.parametrize("strategy", [FedBN, SiloBN])
def test_is_the_model_that_the_node_evaluates(
    strategy: Callable[..., BaseStrategy], tmp_path: Path
) -> None:
    nodes = Evaluated()
    final = state.to_record(nodes.run(strategy(fraction_evaluate=1.0), 3))
    exported = []
    for context in nodes.contexts():
        (tmp_path / "kept").write_bytes(pack_records(context.state))
        for kept in (context.state, read_records(tmp_path / "kept")):
            own = state.from_record(export_personal(final, kept))
            wanted = nodes.models[int(context.node_config["partition-id"])]
            assert list(own) == list(wanted)
            assert all(
                torch.equal(own[name], wanted[name]) and own[name].dtype == wanted[name].dtype
                for name in own
            )
        exported.append(own)
    name = norm.statistics_keys(nodes.model)[0]
    assert len({tuple(own[name].tolist()) for own in exported}) == len(exported)


def test_entries_that_a_mod_keeps_are_exported() -> None:
    nodes = Federation(make_model(), mods=[keep_local("net.7.*")])
    final = state.to_record(nodes.run(FedAvg(fraction_evaluate=0.0), 2))
    context = nodes.grid.context(1000)
    own = state.from_record(export_personal(final, context.state))
    assert not torch.equal(own["net.7.weight"], nodes.model.state_dict()["net.7.weight"])
    assert torch.equal(own["net.0.weight"], state.from_record(final)["net.0.weight"])


def test_a_node_that_keeps_nothing_or_something_else_is_an_error() -> None:
    nodes = Federation(make_model())
    final = state.to_record(nodes.run(FedBN(fraction_evaluate=0.0), 1))
    with pytest.raises(
        ValueError, match="the node keeps no entries of the model: it never trained"
    ):
        export_personal(final, RecordDict())
    context = nodes.grid.context(1000)
    with pytest.raises(
        ValueError, match=r"keeps 'net\.1\.bias', which is not an entry of the server's model"
    ):
        export_personal(ArrayRecord({"other": torch.zeros(1)}), context.state)
    wider = {name: torch.zeros(2, *value.shape) for name, value in state.from_record(final).items()}
    with pytest.raises(
        ValueError, match=r"keeps 'net\.1\.\w+' with shape \(4,\), the model has \(2, 4\)"
    ):
        export_personal(ArrayRecord(wider), context.state)
