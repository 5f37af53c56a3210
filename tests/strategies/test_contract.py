"""What every registered strategy must hold, in one table."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from inspect import Parameter, getdoc, signature
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch import nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import State
from fedbn_flwr.strategies import (
    MTFL,
    REGISTRY,
    BaseStrategy,
    Centralized,
    FedAvg,
    FedBN,
    FedTAN,
    FixBN,
    SiloBN,
)
from fedbn_flwr.wire import Instruction
from tests.helpers.engine_comparison import Stacked
from tests.helpers.faults import failed, spoiling
from tests.helpers.harness import (
    Backwards,
    ClientWrapper,
    Federation,
    Traffic,
    distance,
    make_float32_model,
    make_model,
)

#: a row a strategy: its options, the normalizer of its model, the group of entries that must not
#: leave a node
TABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "fedavg": ({}, "bn", "none"),
    "fedprox": ({"mu": 0.1}, "bn", "none"),
    "fixbn": ({"freeze_round": 1}, "bn", "none"),
    "fedtan": ({}, "bn", "none"),
    "feddna": ({}, "bn", "none"),
    "fedtan-ii": ({"m": 1}, "bn", "none"),
    "fedbs": ({}, "bn", "none"),
    "fedwon": ({"agc": "on"}, "wsconv", "none"),
    "fedbn": ({}, "bn", "bn"),
    "silobn": ({}, "bn", "statistics"),
    "mtfl": ({}, "bn", "affine"),
    "fednorm": ({}, "bn", "none"),
    "scaffold": ({}, "bn", "none"),
    "heterofl": ({}, "static-bn", "none"),
    "hbn": ({"average": 0.5}, "hbn", "mix"),
    "fbn": ({}, "bn", "none"),
    "standalone": ({}, "bn", "all"),
    "fed3r": ({}, "bn", "none"),
    "fedncm": ({}, "bn", "none"),
    "fed3r-personal": ({}, "bn", "none"),
    "centralized": ({}, "bn", "none"),
}

#: solves the head, and does not train
SOLVED = {"fed3r", "fedncm", "fed3r-personal"}


def make(name: str, **options: Any) -> BaseStrategy:
    return REGISTRY[name](**TABLE[name][0], **options)


def federation(name: str, **options: Any) -> Federation:
    return Federation(make_model(TABLE[name][1]), **options)


@cache
def plain(name: str) -> State:
    """Return the end of three rounds in the usual federation."""
    return federation(name).run(make(name))


def test_table_has_a_row_for_every_strategy() -> None:
    assert set(TABLE) == set(REGISTRY)


@pytest.mark.parametrize("name", TABLE)
def test_without_options_a_strategy_has_its_defaults(name: str) -> None:
    strategy = REGISTRY[name]()
    for option, parameter in signature(REGISTRY[name]).parameters.items():
        # options that are parsed have another type then
        taken = getattr(strategy, option, parameter.empty)
        if parameter.kind is Parameter.KEYWORD_ONLY and isinstance(taken, type(parameter.default)):
            assert taken == parameter.default


def test_which_methods_give_every_node_a_model_of_its_own() -> None:
    """Their nodes evaluate; HBN keeps entries on nodes, but its evaluation does not use them."""
    personal = {name for name, strategy in REGISTRY.items() if strategy.personal}
    assert personal == {"fedbn", "silobn", "mtfl", "fednorm", "standalone", "fed3r-personal"}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sampled(8)
def test_dtypes_and_shapes_are_kept(name: str) -> None:
    before = make_model(TABLE[name][1]).state_dict()
    after = plain(name)
    assert {key: (value.dtype, value.shape) for key, value in before.items()} == {
        key: (value.dtype, value.shape) for key, value in after.items()
    }
    assert all(torch.isfinite(value).all() for value in after.values())
    assert all((value >= 0).all() for key, value in after.items() if key.endswith("running_var"))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sampled(8)
def test_a_model_in_float32_stays_in_float32(name: str) -> None:
    after = Federation(make_float32_model(TABLE[name][1])).run(make(name), 2)
    assert {value.dtype for value in after.values()} <= {torch.float32, torch.int64}


#: whose models have no BN that stands still; `fixbn:freeze-round=0` is FixBN's own
MOVING = {
    "fedtan",
    "feddna",
    "fedtan-ii",
    "fedwon",
    "fedbn",
    "silobn",
    "fednorm",
    "heterofl",
    "hbn",
    "fbn",
}


@pytest.mark.parametrize("name", TABLE)
def test_bn_stays_as_the_model_brings_it_or_that_is_refused(name: str) -> None:
    if name in MOVING | SOLVED or name == "fixbn":
        with pytest.raises(
            ValueError if name in MOVING else TypeError, match=r"would be another method|no option"
        ):
            make(name, freeze_bn=True)
        return
    nodes = federation(name)
    before = {key: value.clone() for key, value in nodes.model.state_dict().items()}
    after = nodes.run(make(name, freeze_bn=True))
    still, affine = norm.statistics_keys(nodes.model), norm.affine_keys(nodes.model)
    assert all(
        torch.equal(after[key], before[key]) for key in [*still, *norm.counter_keys(nodes.model)]
    )
    if TABLE[name][2] == "none":
        assert not any(torch.equal(after[key], before[key]) for key in affine)
        assert distance(after, plain(name)) > 1e-6


def test_frozen_bn_is_fixbn_frozen_from_the_start() -> None:
    frozen, fixed = (
        federation("fedavg").run(made) for made in (FedAvg(freeze_bn=True), FixBN(freeze_round=0))
    )
    assert all(torch.equal(frozen[key], value) for key, value in fixed.items())


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sampled(8)
def test_same_seed_same_bits(name: str) -> None:
    again = federation(name).run(make(name))
    assert all(torch.equal(again[key], value) for key, value in plain(name).items())
    if name in SOLVED:  # nothing is drawn
        assert distance(federation(name).run(make(name), seed=99), again) < 1e-12
    elif name != "standalone":
        assert distance(federation(name).run(make(name), seed=99), again) > 1e-6


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sampled(8)
def test_order_and_ids_of_nodes_do_not_matter(name: str) -> None:
    other = federation(name, grid=Backwards).run(make(name))
    assert all(torch.equal(other[key], value) for key, value in plain(name).items())


def trained(nodes: Federation) -> list[Message]:
    """Return the models that nodes answered to training messages."""
    assert isinstance(nodes.grid, Traffic)
    replies = [
        reply for reply in nodes.grid.replies if reply.metadata.message_type.startswith("train")
    ]
    return [reply for reply in replies if wire.ARRAYS in reply.content]


@pytest.mark.parametrize("name", TABLE)
def test_nothing_that_stays_leaves_a_node(name: str) -> None:
    nodes = federation(name, grid=Traffic)
    nodes.run(make(name))
    group = TABLE[name][2]
    secret = state.group_keys(nodes.model, group)
    assert bool(secret) == (group != "none")
    replies = trained(nodes)
    assert len(replies) == (0 if name in SOLVED else 12)
    for reply in replies:
        for record in reply.content.array_records.values():
            assert not secret & {key.split("/")[0] for key in record}


class Failing(BNClient):
    """Raises whenever it should train, or add up anything."""

    def gather(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
        if instruction.gather == wire.STATISTICS:
            return super().gather(received, instruction)
        raise RuntimeError("out of luck")

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        raise RuntimeError("out of luck")


def becomes(kind: type[BNClient], *partitions: int) -> ClientWrapper:
    """Return a wrapper that makes the clients of these partitions, or all, of another class."""

    def wrap(client: BNClient, partition: int) -> BNClient:
        if not partitions or partition in partitions:
            client.__class__ = kind
        return client

    return wrap


@pytest.mark.parametrize("name", TABLE)
def test_survives_and_names_a_failing_node(name: str, caplog: pytest.LogCaptureFixture) -> None:
    after = federation(name, wrap=becomes(Failing, 2)).run(make(name))
    assert all(torch.isfinite(value).all() for value in after.values())
    named = [
        record.getMessage()
        for record in caplog.records
        if "is left out of this round" in record.getMessage()
    ]
    assert len(named) == 3
    assert all("Node 1002 " in text and "out of luck" in text for text in named)


def in_double(arrays: State) -> State:
    return {name: value.double() for name, value in arrays.items()}


#: what becomes of a node's arrays, and what is said of it
ODD_ARRAYS: dict[str, tuple[Callable[[Reply], object], str]] = {
    "in float64": (
        lambda reply: reply.records.update(arrays=in_double(reply.records["arrays"])),
        "is float64, not float32",
    ),
    "absent": (lambda reply: reply.records.pop("arrays"), "it lacks 'arrays'"),
}


@pytest.mark.parametrize("case", ODD_ARRAYS)
def test_a_model_in_other_numbers_or_none_is_refused(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, said = ODD_ARRAYS[case]

    class Odd(BNClient):
        def train(self, *given: Any) -> Reply:
            reply = super().train(*given)
            change(reply)
            return reply

    nodes = Federation(make_float32_model(), wrap=becomes(Odd, 2))
    nodes.run(FedAvg(), 1)
    assert any("Node 1002 is left out" in text and said in text for text in caplog.messages)


class Deaf(BNClient):
    """Trains, but knows no instruction that changes the method."""

    def gather(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
        reply = super().gather(received, Instruction(gather=wire.STATISTICS))
        reply.report = {wire.OBEYED: []}
        return reply

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        plain = {
            key: value
            for key, value in vars(instruction).items()
            if key != "rule_keys" and wire.wire_key(key) not in instruction.binding_keys()
        }
        return super().train(received, Instruction(**plain), exchange)


@pytest.mark.parametrize(
    "name", sorted(TABLE.keys() - {"fedavg", "fedbs", "fednorm", "heterofl", "centralized"})
)
def test_an_instruction_that_nobody_obeys_is_an_error(name: str) -> None:
    with pytest.raises(Exception, match="did not acknowledge"):
        federation(name, wrap=becomes(Deaf)).run(make(name), 3)


def bare(**options: bool) -> nn.Module:
    """Return the usual model; these options are those of its second BN layer, or of both where none
    is left.
    """
    model = make_model()
    for name, layer in list(norm.bn_layers(model).items())[
        -1 if options.pop("one", False) else 0 :
    ]:
        model.set_submodule(
            name, nn.BatchNorm2d(layer.num_features, dtype=torch.float64, **options)
        )
    return model


#: a strategy, a model, and what is said of it; nothing where the strategy trains
BARE: dict[str, tuple[Callable[[], BaseStrategy], Callable[[], nn.Module], str]] = {
    **{
        name: (partial(make, name), partial(make_model, "gn"), "the model has no BN layer")
        for name in sorted(
            TABLE.keys()
            - {"fedavg", "fedprox", "fedbs", "fedwon", "scaffold", "standalone", "centralized"}
            - SOLVED
        )
    },
    "centralized that freezes": (
        partial(Centralized, freeze_round=1),
        partial(make_model, "gn"),
        "no BN layer",
    ),
    "centralized": (Centralized, partial(make_model, "gn"), ""),
    "no statistics to freeze": (
        FixBN,
        partial(bare, track_running_stats=False),
        "'net.1' has no running statistics",
    ),
    "a layer without": (
        FixBN,
        partial(bare, track_running_stats=False, one=True),
        "'net.4' has no running statistics",
    ),
    "no statistics to keep": (
        SiloBN,
        partial(bare, track_running_stats=False),
        "no running statistics",
    ),
    "some to keep": (SiloBN, partial(bare, track_running_stats=False, one=True), ""),
    "nothing affine": (MTFL, partial(bare, affine=False), "'net.1' has no affine parameters"),
    "nothing affine to freeze": (
        partial(FixBN, freeze="affine"),
        partial(bare, affine=False),
        "no affine parameters",
    ),
    "statistics of batches": (FedTAN, partial(bare, affine=False, track_running_stats=False), ""),
}


@pytest.mark.parametrize("grid", [InProcessGrid, Stacked])
@pytest.mark.parametrize("case", BARE)
def test_a_model_on_which_a_method_would_be_another_one_is_refused_in_round_1(
    case: str, grid: type[InProcessGrid]
) -> None:
    strategy, model, said = BARE[case]
    with (
        pytest.raises(Exception, match=f"the method would be another one: .*{said}")
        if said
        else nullcontext()
    ):
        Federation(model(), grid=grid).run(strategy(), 2)


@pytest.mark.parametrize("freeze", ["statistics", "affine", "both"])
def test_what_is_frozen_stands_still_and_is_not_sent(freeze: Any) -> None:
    nodes, strategy = Federation(make_model()), FixBN(freeze_round=1, freeze=freeze)
    early = Federation(make_model()).run(make("fixbn"), 1)
    late = nodes.run(strategy, 3)
    still = {"both": "bn"}.get(freeze, freeze)
    moving = {"statistics": "affine", "affine": "statistics", "both": "none"}[freeze]
    assert all(torch.equal(early[key], late[key]) for key in state.group_keys(nodes.model, still))
    assert all(
        reply.arrays.keys() == late.keys() - state.group_keys(nodes.model, still)
        for reply in strategy.training.replies
    )
    assert all(
        not torch.equal(early[key], late[key]) for key in state.group_keys(nodes.model, moving)
    )


def test_sending_frozen_entries_changes_nothing_but_the_bytes() -> None:
    lean = Federation(make_model()).run(make("fixbn"))
    full = Federation(make_model()).run(FixBN(freeze_round=1, send_frozen=True))
    assert distance(lean, full) < 1e-15


def test_only_a_newcomer_gets_entries_that_nodes_keep() -> None:
    """Also a node that was absent in the round before is no newcomer."""
    nodes, personal = Federation(make_model()), state.group_keys(make_model(), "bn")
    known, last = set[int](), set[int]()
    absent = 0

    class Noting(FedBN):
        def package(
            self, nodes: Sequence[int], arrays: ArrayRecord
        ) -> dict[int, dict[str, ArrayRecord]]:
            nonlocal absent
            packages = super().package(nodes, arrays)
            for node, groups in packages.items():
                assert bool(personal & set(groups["arrays"])) == (node not in known)
            absent += len(known.intersection(nodes) - last)
            return packages

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            result = super().aggregate_train(server_round, replies)
            last.clear()
            last.update(reply.node for reply in self.training.replies)
            known.update(last)
            return result

    nodes.run(Noting(fraction_train=0.5, fraction_evaluate=0.0), 8)
    assert known == {1000, 1001, 1002, 1003}
    assert absent > 2


# ---- hooks ---------------------------------------------------------------------------------------


def documented() -> list[str]:
    """Return the methods that `BaseStrategy` lists, in their order."""
    listed = re.findall(r"^- `(\w+)`:", getdoc(BaseStrategy) or "", re.MULTILINE)
    return [name for name in listed if hasattr(BaseStrategy, name)]


def test_hooks_are_explained_in_the_order_in_which_a_round_calls_them() -> None:
    """Of a round with replies, and of one without; a model's normalizer comes before all rounds."""
    calls: list[tuple[int, str]] = []

    def noting(name: str) -> Callable[..., Any]:
        def note(self: FedAvg, *given: Any) -> Any:
            calls.append((self.round.number, name))
            return getattr(super(kind, self), name)(*given)

        return note

    in_rounds = [name for name in documented() if name not in ("own_norm", "begin")]
    kind: Any = type("Noting", (FedAvg,), {name: noting(name) for name in in_rounds})
    Federation(make_model(), grid=spoiling(failed, lambda _, number: number == 2)).run(
        kind(statistics="exact"), 2, evaluate_every=1
    )
    assert documented()[:2] == ["own_norm", "begin"]
    for number, missing in ((1, "lose_round"), (2, "check, weigh, update")):
        called = list(dict.fromkeys(name for server_round, name in calls if server_round == number))
        assert called == [name for name in in_rounds if name not in missing.split(", ")]
