"""The group `carried` of a message: what is packed is read again, of one client and of a stack of clients."""

import pytest
import torch

from fedbn_flwr.layerwise import Request
from fedbn_flwr.state import State
from fedbn_flwr.wire.carried import pack_values, read_corrections

#: layers by name, in the order of a forward pass, with their numbers of values and channels
WIDTHS = {"stem bn": (12, 3), "head.bn": (4, 1), "deep.bn": (6, 2)}
#: a layer whose inputs are data asks for no gradients
WITHOUT_GRADIENTS = "head.bn"


def requests(*rows: int) -> dict[str, dict[str, Request]]:
    """Return random requests of one client, or of a stack with so many rows."""
    generator = torch.Generator().manual_seed(1)
    asked: dict[str, dict[str, Request]] = {"statistics": {}, "gradients": {}}
    for layer, (count, channels) in WIDTHS.items():
        for kind in ("statistics", "gradients"):
            if (kind, layer) != ("gradients", WITHOUT_GRADIENTS):
                values = torch.rand(*rows, 2, channels, generator=generator)
                asked[kind][layer] = Request(kind, layer, values, count)
    return asked


def stacked(values: State, clients: int) -> State:
    """Return a stack's values as received: with a row for each client in every entry."""
    return {
        name: value if name in ("statistics", "gradients") else torch.stack([value] * clients)
        for name, value in values.items()
    }


@pytest.mark.parametrize("rows", [(), (1,), (4,)])
def test_what_is_packed_is_read_again(rows: tuple[int, ...]) -> None:
    asked = requests(*rows)
    packed = pack_values(asked)
    assert {name: value.shape[-1] for name, value in packed.items() if name in asked} == {
        "statistics": 6,
        "gradients": 5,
    }
    read = read_corrections(stacked(packed, *rows) if rows else packed)
    for kind, corrections in zip(("statistics", "gradients"), read, strict=True):
        assert list(corrections) == sorted(asked[kind])
        for layer, answer in corrections.items():
            assert answer.count == WIDTHS[layer][0]
            assert torch.equal(answer.tensor, asked[kind][layer].tensor)


def test_one_client_sends_one_array_of_each_kind_and_what_its_layers_are() -> None:
    packed = pack_values(requests())
    assert {name: tuple(value.shape) for name, value in packed.items()} == {
        "statistics": (2, 6),
        "gradients": (2, 5),
        "layers": (len("deep.bn head.bn stem bn"),),
        "sizes": (3, 3),
    }
    # by name: counts, channels, and channels with gradients
    assert packed["sizes"].tolist() == [[6, 4, 12], [2, 1, 3], [2, 0, 3]]


def test_statistics_without_gradients() -> None:
    packed = pack_values({**requests(), "gradients": {}})
    statistics, gradients = read_corrections(packed)
    assert len(statistics) == 3
    assert gradients == {}
    assert "gradients" not in packed


def test_a_model_without_bn_layers_sends_nothing_and_gets_nothing() -> None:
    assert pack_values({"statistics": {}, "gradients": {}}) == {}
    assert read_corrections({}) == ({}, {})


def test_names_that_are_no_text_are_those_of_no_layer() -> None:
    packed = pack_values({**requests(), "statistics": {"bn": requests()["statistics"]["deep.bn"]}, "gradients": {}})
    statistics, _ = read_corrections({**packed, "layers": torch.tensor([255, 254], dtype=torch.uint8)})
    assert list(statistics) == ["\ufffd\ufffd"]
