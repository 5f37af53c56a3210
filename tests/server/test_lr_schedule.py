"""Learning rates over the rounds."""

import pytest
import torch

from fedbn_flwr.server.lr_schedule import moment, read_schedule, round_of, share_in_rounds


def rates(
    text: str, rounds: list[int], num_rounds: int | None = 60, frozen_after: int | None = None
) -> list[float]:
    found = [0.1] * len(rounds)
    for change in read_schedule(text):
        found = [
            change.rate(rate, item, num_rounds, frozen_after)
            for rate, item in zip(found, rounds, strict=True)
        ]
    return found


#: a schedule, rounds, their rates of 0.1 without it, and what else `rates` takes
RATES: dict[str, tuple[str, list[int], list[float], dict[str, int | None]]] = {
    # 50 % and 75 % of 60 rounds: after the 30th and the 45th
    "fractions": (
        "0.1@0.5,0.1@0.75",
        [1, 30, 31, 45, 46, 60],
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001],
        {},
    ),
    "numbers of rounds": (
        "0.5@10,=0.3@20,0.5@30",
        [10, 11, 20, 21, 30, 31],
        [0.1, 0.05, 0.05, 0.3, 0.3, 0.15],
        {},
    ),
    "a run of unknown length": ("0.5@10", [11], [0.05], {"num_rounds": None}),
    "from the first round on": ("=0.7@0", [1], [0.7], {}),
    "a value, then a factor": ("=0.4@5,0.5@5", [6], [0.2], {}),
    "a factor, then a value": ("0.5@5,=0.4@5", [6], [0.4], {}),
    "from the freeze on": ("=0.01@freeze", [20, 21], [0.1, 0.01], {"frozen_after": 20}),
    "no freeze yet": ("=0.01@freeze", [20, 60], [0.1, 0.1], {}),
    "a rate of zero": ("=0@2", [2, 3], [0.1, 0.0], {"num_rounds": 4}),
    "a cosine of what comes before, to the last round": (
        "=0.4@3,cosine@0.5,=0.3@freeze",
        [3, 4, 5, 7, 9],
        [0.1, 0.4, 0.4, 0.2, 0.3],
        {"num_rounds": 8, "frozen_after": 8},
    ),
    **{f"nothing, as {text!r}": (text, [1, 60], [0.1, 0.1], {}) for text in ("", " ", ",", " , ")},
    "spaces": (" 0.1@0.5 , =0.2@7 ", [7, 8, 31], [0.1, 0.2, 0.2], {}),
}


@pytest.mark.parametrize("case", RATES)
def test_a_schedule_gives_these_rates(case: str) -> None:
    text, rounds, wanted, options = RATES[case]
    assert rates(text, rounds, **options) == pytest.approx(wanted)


@pytest.mark.parametrize("warm", [0, 4])
def test_a_cosine_is_that_of_torch_and_a_warm_up_is_linear(warm: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 - warm)
    wanted = [0.1 * number / 4 for number in range(1, warm + 1)]
    for _ in range(20 - warm):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    text = f"warmup@{warm},cosine@{warm}" if warm else "cosine"
    assert rates(text, list(range(1, 21)), num_rounds=20) == pytest.approx(wanted)


def test_a_fraction_of_a_short_run_is_its_first_round_at_the_earliest() -> None:
    assert [round_of(0.1, rounds) for rounds in (3, 10, 20)] == [1, 1, 2]


def test_moments() -> None:
    moments = [moment(text) for text in ("0.3", "0", "1", "25.0")]
    assert [round_of(when, 100) for when in moments] == [30, 0, 1, 25]


@pytest.mark.parametrize("text", ["-1", "1.5", "-0.5", "nan", "inf", "soon", ""])
def test_what_is_no_moment_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is n"):
        moment(text)


@pytest.mark.parametrize(
    "text",
    [
        "0.1",
        "warmup",
        "cosine@x",
        "cosin@3",
        "0.1@",
        "@0.5",
        "x@0.5",
        "0.1@x",
        "0.1@1.5",
        "0.1@-3",
        "0.1@inf",
        "nan@0.5",
        "inf@3",
        "-0.1@3",
        "==1@3",
    ],
)
def test_what_cannot_be_read_is_named_with_the_grammar(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"cannot read '.*': a learning-rate schedule is .*FACTOR@WHEN"
    ) as caught:
        read_schedule(f"0.5@0.5,{text}")
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fraction_needs_the_number_of_rounds() -> None:
    assert share_in_rounds(0.5, 60) == 30
    with pytest.raises(ValueError, match=r"fraction 0.5 of a run needs the number of rounds"):
        rates("0.1@0.5", [1], num_rounds=None)
    with pytest.raises(ValueError, match=r"needs the number of rounds"):
        rates("cosine@2", [3], num_rounds=None)
