"""Carried corrections: what a client makes of them, and the group `carried` of a message."""

import pytest
import torch

from fedbn_flwr.layerwise import Kind, Requests
from fedbn_flwr.layerwise.carried import KINDS, correct, correction, pack_values, read_corrections

#: layers by name, in the order of a forward pass, with their numbers of values and channels
WIDTHS = {"stem bn": (12, 3), "head.bn": (4, 1), "deep.bn": (6, 2)}
#: a layer whose inputs are data asks for no gradients
WITHOUT_GRADIENTS = "head.bn"


def requests(clients: int) -> dict[Kind, dict[str, Requests]]:
    """Return random requests of so many clients."""
    generator = torch.Generator().manual_seed(1)
    asked: dict[Kind, dict[str, Requests]] = {"statistics": {}, "gradients": {}}
    for layer, (count, channels) in WIDTHS.items():
        for kind in KINDS:
            if (kind, layer) != ("gradients", WITHOUT_GRADIENTS):
                values = torch.rand(clients, 2, channels, generator=generator)
                asked[kind][layer] = Requests(kind, layer, values, (count,) * clients)
    return asked


@pytest.mark.parametrize("clients", [1, 4])
def test_what_is_packed_is_read_again(clients: int) -> None:
    asked = requests(clients)
    packed = pack_values(asked)
    assert {name: tuple(value.shape) for name, value in packed.items()} == {
        "statistics": (clients, 2, 6),
        "gradients": (clients, 2, 5),
        "layers": (clients, len("deep.bn head.bn stem bn")),
        "sizes": (clients, 3, 3),
    }
    # by name: counts, channels, and channels with gradients
    assert packed["sizes"].tolist() == [[[6, 4, 12], [2, 1, 3], [2, 0, 3]]] * clients
    read = read_corrections(packed)
    assert tuple(read) == KINDS
    for kind, corrections in read.items():
        assert list(corrections) == sorted(asked[kind])
        for layer, answer in corrections.items():
            assert answer.count == WIDTHS[layer][0]
            assert torch.equal(answer.tensor, asked[kind][layer].tensor)


def test_what_is_missing_is_not_sent() -> None:
    """Gradients, of clients that ask for none, and everything, of a model without BN layers."""
    packed = pack_values({**requests(1), "gradients": {}})
    assert "gradients" not in packed
    assert {kind: len(each) for kind, each in read_corrections(packed).items()} == {"statistics": 3}
    assert pack_values({"statistics": {}, "gradients": {}}) == {}
    assert read_corrections({}) == {}


def test_names_that_are_no_text_are_those_of_no_layer() -> None:
    packed = pack_values({**requests(1), "statistics": {"bn": requests(1)["statistics"]["deep.bn"]}, "gradients": {}})
    found = read_corrections({**packed, "layers": torch.tensor([[255, 254]], dtype=torch.uint8)})
    assert list(found["statistics"]) == ["\ufffd\ufffd"]


@pytest.mark.parametrize("kind", ["statistics", "gradients"])
def test_a_correction_takes_local_values_to_the_global_values(kind: Kind) -> None:
    # the third channel is constant at this client, the fourth everywhere
    local = torch.tensor([[[1.0, -2, 3, 0], [4, 0.5, 0, 0]]], dtype=torch.float64)
    pooled = torch.tensor([[2.0, 0, 5, 0], [1, 8, 2, 0]], dtype=torch.float64)
    corrected = correct(kind, local, correction(kind, local, pooled))
    torch.testing.assert_close(corrected, pooled.unsqueeze(0), rtol=1e-12, atol=1e-12)
    assert kind == "gradients" or bool((corrected[:, 1] >= 0).all())


def test_a_correction_that_was_cut_makes_no_variance_negative() -> None:
    """Of a constant channel, and a global variance that is smaller than the client's own was."""
    local, cut = torch.tensor([[[3.0], [0.0]]]), torch.tensor([[[0.0], [0.3]]])
    assert correct("statistics", local, cut).tolist() == [[[3.0], [0.0]]]
