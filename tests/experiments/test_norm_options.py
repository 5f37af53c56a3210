"""Options of a normalizer as text."""

import pytest

from fedbn_flwr.experiments import UsageError
from fedbn_flwr.experiments.norm_options import add_norm_options, parse_norm_options


def test_values_are_what_they_look_like() -> None:
    text = "r_max=3,d_max=0.5,eps=1e-3,instant=true,affine=False,gain=learnable"
    values = parse_norm_options(text)
    assert values == {"r_max": 3, "d_max": 0.5, "eps": 0.001, "instant": True, "affine": False, "gain": "learnable"}
    assert [type(value) for value in values.values()] == [int, float, float, bool, bool, str]


def test_added_options_are_read_as_they_were() -> None:
    added = {"branch_scale": 1e-05, "gain": "constant", "instant": False}
    text = add_norm_options("gamma=2.5,gain=constant", added, "method 'some'")
    assert parse_norm_options(text) == {"gamma": 2.5, **added}
    assert add_norm_options(text, added, "method 'some'") == text


def test_one_option_cannot_have_two_values() -> None:
    with pytest.raises(UsageError, match="norm-options: gain is 'learnable', but method 'some' sets it to 'constant'"):
        add_norm_options("gain=learnable", {"gain": "constant"}, "method 'some'")
