"""Methods: `STRATEGY[+NORM][:key=value]...`, and everything that can be wrong with one."""

from dataclasses import fields
from typing import Annotated, Any, ClassVar

import pytest

from fedbn_flwr.experiments import Config, UsageError, resolve
from fedbn_flwr.experiments.config import GROUPS, Options, shared_options
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.experiments.method import all_options, own_options, owners, parse, split_methods
from fedbn_flwr.plugins.options import Option, Range, convert
from fedbn_flwr.strategies import REGISTRY, FedAvg, FedProx, FixBN
from fedbn_flwr.wire import wire_key


class Parent(FedAvg):
    def __init__(
        self, *, pull_often: Annotated[int | str, "how often it pulls"] = 3, **options: Any
    ) -> None:
        super().__init__(**options)


class Child(Parent):
    replaced: ClassVar[tuple[str, ...]] = ("weighting",)

    def __init__(self, *, pull_often: float = 5.0, bare: bool = False, **options: Any) -> None:
        super().__init__(**options)


def test_an_option_has_its_kind_its_default_and_its_help() -> None:
    option = own_options(Parent)["pull-often"]
    assert option == Option("pull_often", int | str, 3, "how often it pulls")
    assert own_options(FedProx)["mu"] == Option(
        "mu", float, 0.01, "weight of the proximal term", Range(0)
    )
    # a subclass changes the default and keeps the help; what it replaces is not its own
    assert own_options(Child)["pull-often"] == Option(
        "pull_often", float, 5.0, "how often it pulls"
    )
    assert own_options(Child)["bare"] == Option("bare", bool, False, "")
    assert ["weighting" in own_options(kind) for kind in (Parent, Child)] == [True, False]


def test_options_belong_to_the_strategies_that_have_them() -> None:
    assert sorted(owners("mu")) == ["fedbs", "fedprox"]
    untrained = {"fed3r", "fed3r-personal", "fedncm"}
    assert owners("clip-norm") == [name for name in REGISTRY if name not in untrained]
    # objects of Python's are no options, and what follows from shared options is not a strategy's
    # own
    assert not {"privacy", "seed", "lr-schedule", "patience", "evaluate-every"} & set(all_options())
    assert resolve({"method": "fixbn", "mu": "0.2", "freeze-round": "0.25"}).options == {
        "freeze_round": 0.25
    }


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("fedavg", ("fedavg", None, {})),
        ("fedavg+gn", ("fedavg", "gn", {})),
        ("fixbn:freeze-round=0.3", ("fixbn", None, {"freeze-round": "0.3"})),
        (
            "fedavg:model=my.models:tiny:lr=0.5",
            ("fedavg", None, {"model": "my.models:tiny", "lr": "0.5"}),
        ),
        (
            "fedavg:partition=domain:2:10:lr=1",
            ("fedavg", None, {"partition": "domain:2:10", "lr": "1"}),
        ),
        ("fedavg:lr-schedule==0.01@freeze", ("fedavg", None, {"lr-schedule": "=0.01@freeze"})),
    ],
)
def test_a_method_is_taken_apart(method: str, wanted: tuple[Any, ...]) -> None:
    parsed = parse(method)
    assert (parsed.name, parsed.norm, parsed.options) == wanted
    assert parsed.strategy is REGISTRY[parsed.name]


def test_a_methods_own_options_override_the_shared_ones() -> None:
    experiment = resolve(
        {"method": "fedprox+gn:mu=0.5:lr=0.05", "lr": "0.3", "mu": "0.2", "rounds": "7"}
    )
    assert (
        experiment.config.training.lr,
        experiment.config.model.norm,
        experiment.config.rounds,
    ) == (
        0.05,
        "gn",
        7,
    )
    assert experiment.options == {"mu": 0.5}
    strategy = experiment.make_strategy(5)
    assert isinstance(strategy, FedProx)
    assert strategy.mu == 0.5


def test_an_empty_option_of_a_strategy_is_its_default() -> None:
    """In Flower's run configuration every key must exist."""
    empty = dict.fromkeys(all_options(), "")
    experiment = resolve({"method": "fixbn", **empty})
    assert experiment.options == {}
    strategy, default = experiment.make_strategy(5), FixBN()
    assert isinstance(strategy, FixBN)
    assert (strategy.freeze_at, strategy.freeze) == (default.freeze_at, default.freeze)


def test_shared_options_reach_the_strategy() -> None:
    given = {"seed": "4", "fraction-train": "0.5", "evaluate-every": "3", "lr-schedule": "0.5@0.5"}
    strategy = resolve({**given, "node-timeout": "9", "timeout": "50"}).make_strategy(8)
    assert (strategy.seed, strategy.fraction_train, strategy.evaluate_every) == (4, 0.5, 3)
    assert (strategy.exchange_timeout, strategy.patience, strategy.min_available_nodes) == (
        50.0,
        9.0,
        8,
    )
    assert [change.rate(1.0, 6, 10, None) for change in strategy.schedule] == [0.5]
    strategy = resolve({"timeout": "50", "exchange-timeout": "7", "min-nodes": "2"}).make_strategy(
        8
    )
    assert (strategy.exchange_timeout, strategy.min_available_nodes) == (7.0, 2)
    # nodes with models of their own all evaluate them
    assert [
        resolve({"method": name}).make_strategy(5).fraction_evaluate for name in ("fedbn", "fedavg")
    ] == [1.0, 0.0]


def test_a_resolved_experiment_resolves_to_itself() -> None:
    for method in (
        "fedavg",
        "fedprox+gn:mu=0.5:lr=0.05",
        "fixbn:freeze-round=0.3",
        "fedavg:partition=classes:4",
    ):
        experiment = resolve({"method": method, "rounds": "9"})
        again = resolve(experiment.to_mapping())
        assert (again.config, again.options) == (experiment.config, experiment.options)


def test_a_strategy_that_brings_its_own_normalizer_refuses_another() -> None:
    own = {
        name: brought[0]
        for name, kind in REGISTRY.items()
        if (brought := kind.own_norm({})) is not None
    }
    assert own
    for name, norm in own.items():
        assert resolve({"method": name}).config.model.norm == norm
        assert resolve({"method": name, "norm": "gn"}).config.model.norm == norm
        assert resolve({"method": f"{name}+{norm}"}).config.model.norm == norm
        with pytest.raises(UsageError, match=f"sets its own normalizer '{norm}'"):
            resolve({"method": f"{name}+gn"})
    # the ablation of FedWon's table 5
    assert resolve({"method": "fedwon:wsconv=false"}).config.model.norm == "none"


def options_that_build(monkeypatch: pytest.MonkeyPatch, **options: str) -> dict[str, object]:
    """The options that the normalizer of an experiment is built with."""
    built: dict[str, object] = {}
    monkeypatch.setattr(
        "fedbn_flwr.norm.replace", lambda model, kind, **given: built.update(given) or model
    )
    Material.of(resolve(options).config)
    return built


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("hbn", {}),
        ("fedwon:gain=learnable", {"gain": "learnable"}),
        ("fedwon:norm-options=gain=learnable", {"gain": "learnable"}),
        ("fedwon:branch-scale=paper", {"branch_scale": "paper"}),
        ("fedwon:branch-scale=0.2:norm-options=gamma=1", {"branch_scale": 0.2, "gamma": 1}),
        ("fedwon:branch-scale=1:norm-options=branch_scale=1.0", {"branch_scale": 1}),
    ],
)
def test_own_options_of_a_strategy_reach_its_normalizer(
    method: str, wanted: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = options_that_build(monkeypatch, method=method)
    assert built.pop("groups") == Config.model.groups
    assert built == wanted


def test_the_centralized_reference_has_one_node_and_all_clients_batches() -> None:
    experiment = resolve({"method": "centralized", "clients": "4", "batch-size": "8"})
    # its one client resolves what the server has resolved
    for config in (experiment.config, resolve(experiment.to_mapping()).config):
        assert (config.clients, config.training.batch_size, config.data.partition) == (
            1,
            32,
            "union",
        )
        assert (config.fraction_train, config.rounds, config.training.local_steps) == (
            1.0,
            Config.rounds,
            Config.training.local_steps,
        )
    # its own batch size is meant for the one node
    assert (
        resolve({"method": "centralized:batch-size=20", "clients": "4"}).config.training.batch_size
        == 20
    )
    with pytest.raises(UsageError, match="needs clients"):
        resolve({"method": "centralized"}, federation=True)


def test_a_list_of_methods_is_not_split_inside_a_value() -> None:
    schedule = "lr-schedule=warmup@3,0.1@0.5,=0.001@freeze,cosine@9"
    text = f"fedavg, fedtan-ii:m=10:{schedule},fedavg+brn:norm-options=r_max=3,d_max=5,fixbn"
    assert split_methods(text) == [
        "fedavg",
        f"fedtan-ii:m=10:{schedule}",
        "fedavg+brn:norm-options=r_max=3,d_max=5",
        "fixbn",
    ]


# ---- shared options ------------------------------------------------------------------------------


def test_every_option_has_a_kebab_name_and_a_help_text() -> None:
    assert list(shared_options()) == list(Config().to_mapping())
    # an option has one name, and one group
    held = [item.name for group in GROUPS.values() for item in fields(group)]
    own = {item.name for item in fields(Config)} - {*GROUPS}
    assert sorted(map(wire_key, [*held, *own])) == sorted(shared_options())
    # no value that travels is wide
    kinds: list[type[Options]] = [Config, *GROUPS.values()]
    assert max(len(fields(kind)) for kind in kinds) <= 18
    of_strategies = [
        option for strategy in REGISTRY.values() for option in own_options(strategy).values()
    ]
    assert all(option.help for option in [*shared_options().values(), *of_strategies])


#: value, kind, what an option of the kind takes it for
TAKEN: list[tuple[Any, Any, Any]] = [
    ("5", int, 5),
    (5.0, int, 5),
    ("5", float, 5.0),
    ("1e-3", float, 0.001),
    (5, float, 5.0),
    ("true", bool, True),
    ("False", bool, False),
    (True, bool, True),
    ("text", str, "text"),
    (5, str, "5"),
    ("0.5", float | None, 0.5),
    ("5", int | str, 5),
    ("five", int | str, "five"),
]


@pytest.mark.parametrize(("value", "kind", "wanted"), TAKEN)
def test_text_and_numbers_become_what_an_option_takes(value: Any, kind: Any, wanted: Any) -> None:
    found = convert("some-option", value, kind)
    assert found == wanted
    assert type(found) is type(wanted)


#: what is said to be needed, kind, values that it does not take
REFUSED: list[tuple[str, Any, list[Any]]] = [
    ("a whole number", int, ["five", "5.5", 5.5, float("inf"), "", True]),
    ("a number", float, ["fast", "nan", "inf", False]),
    ("true or false", bool, ["yes", 1]),
    ("a number", float | None, ["fast"]),
    ("a whole number or a number", int | float, ["fast"]),
]


@pytest.mark.parametrize(("spoken", "kind", "values"), REFUSED)
def test_what_an_option_cannot_take_is_named(spoken: str, kind: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError) as caught:
            convert("some-option", value, kind)
        assert str(caught.value) == f"some-option must be {spoken}, got {value!r}"
