"""Where a model keeps its state is found anew whenever it may be elsewhere."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import state
from fedbn_flwr.entries import entries_of
from tests.toys import assert_same_state, random_state, toy_cnn


def own(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict(keep_vars=True)


def assert_known(model: nn.Module) -> None:
    entries = entries_of(model)
    assert entries is not None
    wanted = own(model)
    assert [name for name, _, _ in entries.layout.entries] == list(wanted)
    assert all(found is value for found, value in zip(entries.values, wanted.values(), strict=True))
    first = {id(value): name for name, value in reversed(wanted.items())}
    different = random_state(model, seed=3)
    given = {name: different[first[id(value)]] for name, value in wanted.items()}
    state.load(model, state.read(state.to_record(given)))
    assert_same_state(model.state_dict(), given)
    assert_same_state(state.snapshot(model), given)


def put_parameter(model: nn.Sequential) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(2)))


def put_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("extra", torch.zeros(2))


def put_layer(model: nn.Sequential) -> None:
    model[5] = nn.Linear(48, 4)


def append_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(4, 4))


def put_tensor(model: nn.Sequential) -> None:
    model[5].weight = nn.Parameter(torch.zeros(4, 48))


def put_running_mean(model: nn.Sequential) -> None:
    model[1].running_mean = torch.zeros(3)


def drop_bias(model: nn.Sequential) -> None:
    model[5].register_parameter("bias", None)


def to_double(model: nn.Sequential) -> None:
    model.double()


def share_layer(model: nn.Sequential) -> None:
    model.append(model[5])


def parametrize(model: nn.Sequential) -> None:
    torch.nn.utils.parametrizations.weight_norm(model[5])


CHANGES: list[Callable[[nn.Sequential], None]] = [
    put_parameter,
    put_buffer,
    put_layer,
    append_layer,
    put_tensor,
    put_running_mean,
    drop_bias,
    to_double,
    share_layer,
    parametrize,
]


def test_they_are_the_models_own() -> None:
    assert_known(toy_cnn())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[nn.Sequential], None]) -> None:
    model = toy_cnn()
    assert_known(model)
    change(model)
    assert_known(model)


class Telling(nn.Linear):
    """Has more in its state dict than parameters and buffers."""

    def get_extra_state(self) -> Tensor:
        return torch.tensor(1.0)

    def set_extra_state(self, value: Tensor) -> None:
        self.told = value


def test_a_state_of_other_things_is_not_known() -> None:
    model = nn.Sequential(Telling(2, 2))
    assert entries_of(model) is None
    assert set(state.snapshot(model)) == {"0.weight", "0.bias", "0._extra_state"}


def test_a_model_is_not_kept_alive() -> None:
    model = toy_cnn()
    entries_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
