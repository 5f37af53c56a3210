"""How the fastest way is found, kept, and done without."""

from functools import partial
from pathlib import Path

import pytest
import torch

from fedbn_flwr.client import BNClient
from fedbn_flwr.simulation import CohortGrid
from fedbn_flwr.simulation.stacked.memory_budget import bytes_of_a_client, clients_that_fit
from fedbn_flwr.simulation.stacked.timing import Choice, Kept, describe, measure
from fedbn_flwr.simulation.stacked.variants import Variants
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.toys import toy_cnn, toy_split


def fail() -> int:
    raise RuntimeError("no C++ compiler\nwas found")


def test_what_fails_is_left_out_with_its_reason() -> None:
    found = measure({"plain": lambda: 1, "compiled": fail})
    assert found.way == "plain"
    assert found.left_out == {"compiled": "RuntimeError: no C++ compiler was found"}
    assert "compiled left out: RuntimeError: no C++ compiler was found" in str(found)


def test_a_choice_is_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "folder" / "engine.json")
    assert kept.recall("model") is None
    kept.keep("model", Choice("stacked", {"stacked": 0.5}))
    assert Kept(tmp_path / "folder" / "engine.json").recall("model") == Choice("stacked", {"stacked": 0.5})


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model": {"other": 1}}'])
def test_a_spoilt_file_costs_a_measurement(content: str, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(content)
    kept = Kept(tmp_path / "engine.json")
    assert kept.recall("model") is None
    kept.keep("model", Choice("plain"))
    assert kept.recall("model") == Choice("plain")


def test_models_and_circumstances_have_keys_of_their_own() -> None:
    keys = {describe(toy_cnn(), 20), describe(toy_cnn(), 10), describe(toy_cnn(dropout=0.5), 20)}
    assert len(keys) == 3
    assert describe(toy_cnn(seed=1), 20) in keys


def test_the_measured_way_is_used_and_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "engine.json")
    grids: list[CohortGrid] = []

    def make_grid(*arguments: object) -> CohortGrid:
        grids.append(CohortGrid(*arguments, kept=kept))  # type: ignore[arg-type]
        return grids[-1]

    for _ in range(2):
        federation = Federation(make_model(), grid=make_grid)  # type: ignore[arg-type]
        federation.run(FedAvg(fraction_evaluate=0.0))
    first, second = (list(grid.choices.values()) for grid in grids)
    assert first == second
    assert set(first[0].seconds) == {"plain", "channels-last", "stacked", "stacked-channels-last"}
    assert first[0].way == min(first[0].seconds, key=first[0].seconds.__getitem__)


def test_a_compiler_that_is_not_there_is_said_and_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    grids: list[CohortGrid] = []

    def make_grid(*arguments: object) -> CohortGrid:
        kept = Kept(tmp_path / "engine.json")
        grids.append(CohortGrid(*arguments, kept=kept, expected_steps=10**12))  # type: ignore[arg-type]
        return grids[-1]

    Federation(make_model(), grid=make_grid).run(FedAvg(fraction_evaluate=0.0))  # type: ignore[arg-type]
    (found,) = grids[0].choices.values()
    assert found.left_out == {"compiled": "RuntimeError: no C++ compiler"}


@pytest.mark.parametrize("way", ["plain", "channels-last"])
def test_every_way_gives_the_same_model(way: str) -> None:
    wanted = Federation(make_model()).run(FedAvg(fraction_evaluate=0.0))
    make_grid = partial(CohortGrid, way=way)
    found = Federation(make_model(), grid=make_grid).run(FedAvg(fraction_evaluate=0.0))  # type: ignore[arg-type]
    assert distance(found, wanted) < 1e-10


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_model() -> None:
    wanted = Federation(make_model()).run(FedAvg(fraction_evaluate=0.0), 1)
    make_grid = partial(CohortGrid, way="compiled")
    found = Federation(make_model(), grid=make_grid).run(FedAvg(fraction_evaluate=0.0), 1)  # type: ignore[arg-type]
    assert distance(found, wanted) < 1e-8


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown way 'fast'; known: auto, plain"):
        CohortGrid(None, 1, way="fast")  # type: ignore[arg-type]


def test_as_many_are_stacked_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    client, instruction = BNClient(toy_cnn(), toy_split(), num_classes=4, device="cpu"), Instruction(batch_size=5)
    needed = bytes_of_a_client(client, instruction)
    assert needed > 6 * sum(value.nbytes for value in client.model.state_dict().values())
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.memory_budget.free_memory", lambda _: 7 * needed)
    assert clients_that_fit(client, instruction) == 3
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.memory_budget.free_memory", lambda _: 0)
    assert clients_that_fit(client, instruction) == 1


def test_variants_are_made_once() -> None:
    variants, model = Variants(), toy_cnn()
    clients = [BNClient(model, toy_split(), num_classes=4, device="cpu") for _ in range(2)]
    for client in clients:
        variants.prepare(client, "channels-last")
    assert clients[0].model is clients[1].model is not model
    assert clients[0].model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
