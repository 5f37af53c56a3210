"""Where a model keeps its state is found anew whenever it may be elsewhere."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import state
from fedbn_flwr.state.model_entries import entries_of
from tests.helpers.toys import assert_same_state, random_state, toy_cnn


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
    state.load(model, state.view_record(state.to_record(given)))
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


def to_double_without_buffers(model: nn.Sequential) -> None:
    del model[1]
    assert_known(model)
    model.double()


def reshape(model: nn.Sequential) -> None:
    model[5].bias.data = torch.zeros(2, 2)


def put_what_was_none(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.zeros(3))


def untie(model: nn.Sequential) -> None:
    model.append(nn.Linear(48, 4))
    model[6].weight = model[5].weight
    assert_known(model)
    model[5].weight = nn.Parameter(torch.zeros(4, 48))


def rename(model: nn.Sequential) -> None:
    layer = model[5]
    del model[5]
    model.add_module("head", layer)


def stop_keeping(model: nn.Sequential) -> None:
    mean = model[1].get_buffer("running_mean")
    del model[1].running_mean
    model[1].register_buffer("running_mean", mean, persistent=False)


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
    to_double_without_buffers,
    reshape,
    put_what_was_none,
    untie,
    rename,
    stop_keeping,
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


def test_a_model_without_a_state() -> None:
    model = nn.Sequential(nn.ReLU())
    state.load(model, state.view_record(state.to_record({})))
    assert dict(state.snapshot(model)) == {}


def test_a_model_in_bfloat16_is_loaded() -> None:
    model = toy_cnn().bfloat16()
    given = {name: value + 1 for name, value in model.state_dict().items()}
    state.load(model, given)
    assert_same_state(model.state_dict(), given)


def test_a_model_is_not_kept_alive() -> None:
    model = toy_cnn()
    entries_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
