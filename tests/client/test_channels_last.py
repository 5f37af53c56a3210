"""Images of a client that trains alone have their channels last, where that is faster on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import models, wire
from fedbn_flwr.client import BNClient, bn_client
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.client.image_order import channels_last
from fedbn_flwr.data import Split
from fedbn_flwr.state import snapshot
from fedbn_flwr.wire import Instruction

SIDE, CHANNELS = 32, 8


def chain(*more: nn.Module) -> nn.Sequential:
    body = nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), *more
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 4))


def images(side: int = SIDE) -> Tensor:
    return torch.randn(5, 3, side, side, generator=torch.Generator().manual_seed(0))


def is_last(values: Tensor) -> bool:
    return values.stride(1) == 1


class Own(nn.Module):
    """A forward of its own, which may need the usual order."""

    def forward(self, values: Tensor) -> Tensor:
        return values.view(len(values), -1).view_as(values)


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("small-cnn", 32, True),
        ("small-cnn", 28, True),
        ("small-cnn", 20, False),
        ("resnet20", 32, True),
        ("mobilenetv2", 64, True),
        ("resnet18", 64, False),
        ("lenet", 32, False),
        ("mlp", 32, False),
        ("timm:test_resnet", 32, True),
    ],
)
def test_models_of_this_project(name: str, size: int, wanted: bool) -> None:
    assert is_last(channels_last(images(size), models.build(name, 10, 3, size))) == wanted


def test_images_of_one_channel_are_told_apart_by_their_strides() -> None:
    gray = channels_last(images(28)[:, :1], models.build("small-cnn", 10, 1, 28))
    assert gray.stride() == (28 * 28, 1, 28, 1)


def test_an_evaluation_has_this_order() -> None:
    model = models.build("small-cnn", 10, 3, SIDE)
    seen = list[bool]()
    model[3].register_forward_pre_hook(lambda _, inputs: seen.append(is_last(inputs[0])))  # type: ignore[index]
    evaluate(model, Split(images(), torch.arange(5)), 10, "cpu", batch_size=3)
    assert seen == [True, True]


def test_a_layer_that_may_need_the_usual_order_keeps_it() -> None:
    assert is_last(channels_last(images(), chain()))
    assert is_last(
        channels_last(images(), nn.Sequential(*chain()[:-1], nn.Dropout(), nn.Linear(CHANNELS, 4)))
    )
    for layer in (nn.GroupNorm(2, CHANNELS), nn.Dropout(), nn.Dropout2d(), Own()):
        given = images()
        assert channels_last(given, chain(layer)) is given
    vectors = torch.randn(5, 3 * SIDE * SIDE)
    assert channels_last(vectors, chain()) is vectors


class OwnClient(BNClient):
    """A user's class, which may train in a way of its own."""


def trained(kind: type[BNClient]) -> tuple[BNClient, Any, list[bool]]:
    model, seen = models.build("small-cnn", 10, 3, SIDE), list[bool]()
    model[3].register_forward_pre_hook(lambda _, inputs: seen.append(is_last(inputs[0])))  # type: ignore[index]
    client = kind(model, Split(images(), torch.arange(5)), device="cpu")
    reply = client.train(
        {wire.ARRAYS: snapshot(model)}, Instruction(local_steps=3, batch_size=4, lr=0.1)
    )
    return client, reply.records[wire.ARRAYS], seen


def test_a_client_trains_so_and_its_state_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    client, state, seen = trained(BNClient)
    assert seen == [True] * 3
    assert all(value.is_contiguous() for value in client.model.state_dict().values())
    _, own_state, own_seen = trained(OwnClient)
    assert own_seen == [False] * 3
    for name, value in own_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(bn_client, "channels_last", lambda inputs, _: inputs)
    _, usual, _ = trained(BNClient)
    assert all(torch.equal(usual[name], value) for name, value in own_state.items())
