"""Rules: how they are registered, the bounds on gradients, and kept momentum."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models import mobilenet_v2, squeezenet1_1

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.rules import RULES, Rule, Session, read_instruction, register_rule, rules_for
from fedbn_flwr.client.rules.gradient_norm import classifier_parameters, clip_gradients
from fedbn_flwr.norm import replace
from fedbn_flwr.server.constructor_options import constructor_options
from fedbn_flwr.strategies import REGISTRY
from fedbn_flwr.wire import Instruction
from tests.helpers.registered import registries_restored

Array = NDArray[np.float64]


def clipped(weight: Array, gradient: Array, factor: float) -> Array:
    """Unit by unit, as it is printed."""
    if weight.ndim < 2:
        return clipped_unit(weight, gradient, factor)
    return np.stack([clipped_unit(w, g, factor) for w, g in zip(weight, gradient, strict=True)])


def clipped_unit(weight: Array, gradient: Array, factor: float) -> Array:
    weight_norm, gradient_norm = max(np.sqrt((weight**2).sum()), 1e-3), np.sqrt((gradient**2).sum())
    if gradient_norm / weight_norm > factor:
        gradient = gradient * (factor * weight_norm / gradient_norm)
    return gradient


channels = st.integers(1, 5)
layers = st.one_of(
    st.builds(nn.Linear, channels, channels),
    st.builds(nn.Conv2d, channels, channels, st.tuples(st.integers(1, 3), st.integers(1, 3))),
    st.builds(nn.Conv1d, channels, channels, st.integers(1, 4)),
    channels.map(lambda count: nn.Conv2d(count, 2 * count, 3, groups=count)),  # depthwise
    channels.map(nn.BatchNorm1d),
)


@settings(max_examples=80, deadline=None)
@given(layers, st.sampled_from([1e-3, 0.1, 1.0]), st.floats(1e-4, 10.0), st.integers(0, 2**31))
def test_clipping_is_the_printed_formula(
    layer: nn.Module, factor: float, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer.double()
    expected = []
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter[0] *= 1e-5  # a unit that has all but died
        parameter.grad = (
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size
        )
        expected.append(clipped(parameter.detach().numpy(), parameter.grad.numpy().copy(), factor))
    clip_gradients(dict(layer.named_parameters()), factor)
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-9)


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_a_learnable_gain_is_one_unit(convolution: type[nn.Module]) -> None:
    """Equation 3 is about the rows of weight matrices.

    Gains and biases are taken as one unit each.
    """
    model = replace(
        nn.Sequential(convolution(2, 3, 3), nn.ReLU(), nn.Flatten()), "wsconv", gain="learnable"
    ).double()
    gain = dict(model.named_parameters())["0.gain"]
    with torch.no_grad():
        gain.copy_(torch.tensor([3.0, 4.0, 12.0]).reshape(gain.shape))  # the norm is 13
    # the norm is 0.3
    gain.grad = torch.tensor([0.1, 0.2, 0.2], dtype=torch.float64).reshape(gain.shape)
    clip_gradients({"0.gain": gain}, 0.1)
    assert gain.grad.flatten().tolist() == [0.1, 0.2, 0.2]
    clip_gradients({"0.gain": gain}, 0.01)
    expected = np.array([0.1, 0.2, 0.2]) * 0.13 / 0.3
    np.testing.assert_allclose(gain.grad.flatten().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("a.weight", (3, 2, 3)), ("a.b.gain", (3, 1, 1)), ("a.bias", (3,)), ("temperature", ())],
)
def test_stacked_models_are_clipped_one_by_one(name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    # the last is not clipped
    sizes = torch.tensor([0.01, 1.0, 100.0]).reshape(3, *[1] * len(shape))
    weights, gradients = (
        torch.randn(3, *shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    together = nn.Parameter(weights * sizes)
    together.grad = gradients.clone()
    clip_gradients({name: together}, 0.1, stacked=True)
    for row, weight in enumerate(weights * sizes):
        alone = nn.Parameter(weight)
        alone.grad = gradients[row].clone()
        clip_gradients({name: alone}, 0.1)
        torch.testing.assert_close(alone.grad, together.grad[row])
    assert not torch.equal(together.grad[0], gradients[0])
    assert torch.equal(together.grad[2], gradients[2])


@pytest.mark.parametrize("make", [mobilenet_v2, squeezenet1_1])
def test_the_classifier_is_the_last_linear_layer_or_the_last_convolution(
    make: Callable[[], nn.Module],
) -> None:
    with torch.device("meta"):
        model = make()
    found = classifier_parameters(model)
    expected = list(model.get_submodule("classifier.1").parameters())
    assert [id(parameter) for parameter in found] == [id(parameter) for parameter in expected]
    assert classifier_parameters(nn.ReLU()) == []


# ---- the norm of a step's whole gradient ---------------------------------------------------------


#: below and above the norms of the gradients, and of some of them
BOUNDS = [0.01, 3.0, 100.0]


def model_of(seed: int) -> nn.Module:
    """Return a model with gradients of a client's own size.

    One parameter has none, and one does not learn.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(2, 1))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    model[3].requires_grad_(False)
    for parameter in list(model.parameters())[:-3]:
        parameter.grad = torch.randn_like(parameter) * 10**seed / 10
    model.get_parameter("scale").grad = torch.tensor(0.5)
    return model


def adjust(model: nn.Module, bound: float) -> None:
    instruction = Instruction().with_rule(clip_norm=bound)
    session = Session(
        model, torch.optim.SGD(model.parameters()), instruction, {}, Memory(RecordDict())
    )
    rules = rules_for(instruction)
    for rule in rules:
        rule.begin(session)
    for rule in rules:
        rule.adjust()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("bound", BOUNDS)
def test_gradients_are_scaled_as_torch_scales_them(bound: float) -> None:
    for seed in range(3):
        model, wanted = model_of(seed), model_of(seed)
        torch.nn.utils.clip_grad_norm_(wanted.parameters(), bound)
        adjust(model, bound)
        scaled = gradients_of(model)
        assert scaled.keys() == gradients_of(wanted).keys()
        assert all(
            torch.equal(scaled[name], gradient) for name, gradient in gradients_of(wanted).items()
        )


@pytest.mark.parametrize(
    "name", [name for name in REGISTRY if "clip_norm" in constructor_options(REGISTRY[name])]
)
def test_every_method_asks_for_it_so_that_a_client_must_acknowledge_it(name: str) -> None:
    for strategy, asked in ((REGISTRY[name](clip_norm=2), True), (REGISTRY[name](), False)):
        strategy.num_rounds = 4
        assert ("clip-norm" in strategy.instruct(Instruction(batch_size=8)).binding_keys()) == asked


# ---- the momentum that a node or the server keeps ------------------------------------------------


BUFFER = "momentum_buffer"


def session_of(
    model: nn.Module, kept: str, received: dict[str, Tensor], local: set[str], memory: Memory
) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return Session(
        model, optimizer, Instruction(momentum_state=kept), {wire.MOMENTUM: received}, memory, local
    )


def one_round(session: Session, gradient: float) -> None:
    """One step along the same number in every gradient."""
    (rule,) = rules_for(session.instruction)
    rule.begin(session)
    for parameter in session.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    session.optimizer.step()
    rule.finish(session)


def test_the_servers_momentum_is_not_changed_by_the_steps_of_a_node() -> None:
    model, received = nn.Linear(1, 1, bias=False), {f"weight/{BUFFER}": torch.tensor([[4.0]])}
    session = session_of(model, "global", received, set(), Memory(RecordDict()))
    one_round(session, 1.0)
    # .5 x 4 + 1, and what was received is as it was
    assert session.records[wire.MOMENTUM] == {f"weight/{BUFFER}": torch.tensor([[3.0]])}
    assert received == {f"weight/{BUFFER}": torch.tensor([[4.0]])}


def test_of_parameters_without_a_gradient_only_momentum_that_came_goes_on() -> None:
    """An optimizer whose state is kept has some for the others, too."""
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("known", "new")})
    received = {f"known.weight/{BUFFER}": torch.tensor([[4.0]])}
    session = session_of(model, "global", received, set(), Memory(RecordDict()))
    session.steady = True
    for parameter in model.parameters():
        session.optimizer.state[parameter][BUFFER] = torch.zeros_like(parameter)
    (rule,) = rules_for(session.instruction)
    rule.begin(session)
    rule.finish(session)
    assert session.records[wire.MOMENTUM] == received


def test_names_with_the_sign_that_divides_entries_are_sent_or_kept_like_others() -> None:
    model = nn.ModuleDict(
        {"in/side": nn.Linear(1, 1, bias=False), "out/side": nn.Linear(1, 1, bias=False)}
    )
    memory, local = Memory(RecordDict()), {"in/side.weight"}
    for wanted in (1.0, 1.5):
        session = session_of(model, "global", {}, local, memory)
        one_round(session, 1.0)
        # nothing is received back, so that what travels begins anew
        assert session.records[wire.MOMENTUM] == {
            f"out/side.weight/{BUFFER}": torch.tensor([[1.0]])
        }
        assert memory.recall(wire.MOMENTUM) == {
            f"in/side.weight/{BUFFER}": torch.tensor([[wanted]])
        }


# ---- how rules are registered, and switched on ---------------------------------------------------


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget what a test registers."""
    with registries_restored():
        yield


def test_a_rule_is_on_when_one_of_its_keys_is_not_at_its_default() -> None:
    @register_rule
    class Pull(Rule):
        pull_strength: float = 0.0
        pull_kind: str = "even"

    off = Instruction().with_rule(pull_strength=0.0, pull_kind="even")
    assert rules_for(off) == []
    (rule,) = rules_for(Instruction().with_rule(pull_strength=0.5))
    assert isinstance(rule, Pull)
    assert (rule.pull_strength, rule.pull_kind) == (0.5, "even")
    (rule,) = rules_for(read_instruction({"fedbn.pull-kind": "odd", "pull-strength": 3}))
    assert isinstance(rule, Pull)
    assert (rule.pull_strength, rule.pull_kind) == (0.0, "odd")


def test_a_rules_field_may_be_one_of_the_instruction() -> None:
    instruction = read_instruction(Instruction(momentum_state="local").to_config())
    assert instruction == Instruction(momentum_state="local")
    assert instruction.binding_keys() == ["momentum-state"]
    (rule,) = rules_for(instruction)
    assert rule.momentum_state == "local"  # type: ignore[attr-defined]


def register(name: str, **keys: Any) -> type[Rule]:
    """Register a rule with these keys; a type in the place of a default is a key without one."""
    kinds = {key: value if isinstance(value, type) else type(value) for key, value in keys.items()}
    defaults = {key: value for key, value in keys.items() if not isinstance(value, type)}
    return register_rule(
        type(name, (Rule,), {"__annotations__": kinds, **defaults, "__module__": __name__})
    )


def test_the_order_is_not_that_of_registration_and_bounds_are_last() -> None:
    def order(*names: str) -> list[str]:
        for name in names:
            register(name, **{name: 0})
        asked = Instruction().with_rule(first=1, second=1, zzz=1, clip_factor=0.1, clip_norm=0.1)
        return [type(rule).__name__ for rule in rules_for(asked)]

    wanted = ["first", "second", "zzz", "Clipping", "GradientNorm"]
    assert order("zzz", "first", "second") == order("second", "zzz", "first") == wanted


def test_a_class_that_is_defined_again_takes_the_place_of_the_one_before() -> None:
    for strength in (1.0, 2.0):

        @register_rule
        class Pull(Rule):
            pull: bool = False
            times: ClassVar[float] = strength

            def begin(self, session: Session) -> None:
                """Do nothing."""

    (rule,) = rules_for(Instruction().with_rule(pull=True))
    assert rule.times == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"half": 0.0, "proximal_mu": 0.0},
            "Proximal has the key 'proximal-mu'; known keys: .*clip-factor",
        ),
        ({}, "has no field"),
        ({"pull": float}, "'pull' needs a default that is a number, text or truth value"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_and_leaves_nothing(
    keys: dict[str, Any], message: str
) -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=f"rule Mine:? {message}"):
        register("Mine", **keys)
    assert before == RULES
