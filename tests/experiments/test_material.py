"""Data, partition, model and rounds of an experiment."""

import pytest
import torch

from fedbn_flwr.data import Data, Split
from fedbn_flwr.experiments import Config, resolve
from fedbn_flwr.experiments.checks import checked_material
from fedbn_flwr.experiments.material import Material, load_data, rounds_within_budget
from tests.helpers.toys import assert_same_state

TINY = "synthetic:n=200:test=20:classes=4:size=8:channels=1"


def config(**options: object) -> Config:
    return Config(**{"dataset": TINY, "model": "small-cnn", "partition": "iid", **options})  # type: ignore[arg-type]


# ---- a budget of epochs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "clients", "rounds"),
    [
        ({"rounds": 7}, 5, 7),
        # a round of 5 clients sees 5 * 2 * 4 = 40 of 200 samples, a fifth of an epoch
        ({"budget_epochs": 3, "local_steps": 2, "batch_size": 4}, 5, 15),
        # half of the clients see half of that
        ({"budget_epochs": 3, "local_steps": 2, "batch_size": 4, "fraction_train": 0.5}, 10, 15),
        # as many clients take part as the strategy draws: the whole number below 5 * 0.5
        ({"budget_epochs": 3, "local_steps": 2, "batch_size": 5, "fraction_train": 0.5}, 5, 30),
        # with epochs, every client sees all of its own
        ({"budget_epochs": 12, "local_epochs": 2}, 5, 6),
        ({"budget_epochs": 12, "local_epochs": 2, "fraction_train": 0.4}, 5, 15),
        # never none
        ({"budget_epochs": 0.01, "local_epochs": 2}, 5, 1),
        # the validation samples are not trained on: 160 are left
        ({"budget_epochs": 2, "local_steps": 4, "batch_size": 4, "validation": 0.2}, 5, 4),
    ],
)
def test_a_budget_of_epochs_sets_the_rounds(options: dict[str, float], clients: int, rounds: int) -> None:
    given = config(**options)
    assert rounds_within_budget(given, clients, len(load_data(given).train)).rounds == rounds


def test_the_centralized_reference_has_the_same_budget() -> None:
    shared = {"dataset": TINY, "budget-epochs": 3, "local-steps": 2, "batch-size": 4, "clients": 5}
    federated, central = (resolve({**shared, "method": method}).config for method in ("fedavg", "centralized"))
    assert rounds_within_budget(federated, 5, 200).rounds == rounds_within_budget(central, 1, 200).rounds == 15


# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_model_fits_the_data_and_is_a_function_of_the_seed() -> None:
    first, again, other = (Material.of(config(seed=seed)).model.state_dict() for seed in (1, 1, 2))
    assert_same_state(first, again)
    assert not torch.equal(next(iter(first.values())), next(iter(other.values())))
    assert next(iter(first.values())).shape[1] == 1
    assert Material.of(config()).model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)


# ---- data ------------------------------------------------------------------------------------------------------------


def test_validation_takes_the_test_datas_place_and_is_not_trained_on() -> None:
    whole, held_out = load_data(config()), load_data(config(validation=0.25))
    assert (len(held_out.train), len(held_out.test)) == (150, 50)
    assert held_out is load_data(config(validation=0.25, seed=3))

    def rows(inputs: torch.Tensor) -> set[bytes]:
        return {row.numpy().tobytes() for row in inputs}

    assert rows(held_out.train.inputs) | rows(held_out.test.inputs) == rows(whole.train.inputs)
    assert rows(held_out.test.inputs).isdisjoint(rows(whole.test.inputs))


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_only_a_federation_that_is_there_knows_how_many_it_is() -> None:
    there = resolve({"dataset": TINY}, federation=True)
    material = checked_material(there, there.make_strategy(0))
    assert material
    assert not material.partition
    assert [resolve({"dataset": TINY}, federation=there).config.clients for there in (True, False)] == [0, 5]


def test_sharing_leaves_a_users_array_its_memory() -> None:
    """The array is a view of the tensor's memory, which nobody else may free."""
    inputs = torch.rand(6, 3)
    array, view, split = inputs.numpy(), inputs[:3], Split(inputs, torch.arange(6) % 2)
    place = array.ctypes.data
    assert Data("own", split, split, 2).share()
    assert split.inputs.is_shared()
    assert split.inputs.data_ptr() != place
    assert torch.equal(torch.from_numpy(array), split.inputs)
    # what else views the memory is where it was, which sharing in place would have moved
    assert (view.data_ptr(), view.is_shared()) == (place, False)
