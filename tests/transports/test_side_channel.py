"""Layer-wise steps over a side channel: the bits of a run in process, and rounds of the other nodes
when one fails.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import state
from fedbn_flwr.client import Reply
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.deployment.cli import main as fedbn_flwr
from fedbn_flwr.layerwise import Answer, Requests, SuspendedStep
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedAvg, FedDNA, FedTAN
from fedbn_flwr.transports import message_client, side_channel_client
from fedbn_flwr.transports.counting_grid import CountingGrid, Traffic
from fedbn_flwr.transports.message_records import REQUEST, SIDE_CHANNEL
from fedbn_flwr.transports.side_channel_client import (
    CERTIFICATES_VARIABLE,
    SITE_ADDRESS_VARIABLE,
    NodeStream,
)
from fedbn_flwr.transports.side_channel_grid import SideChannelGrid, SideChannelOptions
from tests.helpers.checkout import ROOT
from tests.helpers.concurrent_nodes import ConcurrentNodes, Site, dropout_model, make_client
from tests.helpers.faults import FAULTY
from tests.helpers.harness import SIZES, Federation
from tests.helpers.ports import free_ports

#: the most exchanges, the fewest, and what nodes keep
CASES: dict[str, Callable[..., FedAvg]] = {
    "FedTAN, mean and variance one after the other": lambda **options: FedTAN(
        exchange="paper", **options
    ),
    "FedDNA": FedDNA,
    "momentum of the node": lambda **options: FedTAN(momentum_state="local", **options),
}
#: uses of BN layers, and the exchanges at them in a round of FedTAN
LAYERS = 2
EXCHANGES = 2 * LAYERS
#: the partition of the node that fails
PARTITION = FAULTY - 1000
#: seconds that healthy nodes always keep to
ENOUGH = 120.0


def options(**changes: Any) -> SideChannelOptions:
    """Return options of a channel without TLS, with deadlines that nobody misses."""
    (port,) = free_ports(1)
    return replace(SideChannelOptions(port, f"localhost:{port}", None, ENOUGH), **changes)


def run(grid: Grid, strategy: FedAvg, rounds: int = 1, **more: Any) -> tuple[state.State, Traffic]:
    counted = CountingGrid(grid)
    return Federation(dropout_model()).run(
        strategy, rounds, counted, evaluate_every=1, momentum=0.9, augmentation="crop-flip", **more
    ), counted.training


@contextmanager
def concurrent(sites: Mapping[int, Site] | None = None) -> Iterator[ConcurrentNodes]:
    nodes = ConcurrentNodes(len(SIZES), sites)
    try:
        yield nodes
    finally:
        nodes.close()


def in_process(
    strategy: FedAvg, rounds: int = 1, without: int | None = None, **more: Any
) -> tuple[state.State, Traffic]:
    class Nodes(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            return [node for node in super().get_node_ids() if node != without]

    return run(Nodes(client_app(make_client), len(SIZES)), strategy, rounds, **more)


def same(one: state.State, other: state.State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1)
def test_bits_and_counts_are_those_in_process(case: str, caplog: pytest.LogCaptureFixture) -> None:
    with concurrent() as nodes:
        after, counted = run(
            SideChannelGrid(nodes, options()), CASES[case](fraction_evaluate=0.0), 2
        )
        assert len(nodes.processes()) == 2 * len(SIZES), "one message a node and round"
    here, wanted = in_process(CASES[case](fraction_evaluate=0.0), 2)
    assert same(after, here)
    assert (counted.exchanges, counted.payload, counted.paper) == (
        wanted.exchanges,
        wanted.payload,
        wanted.paper,
    )
    assert not [text for text in caplog.messages if "left out" in text or "by messages" in text]
    # in each round, Flower brings the message of the first exchange, and the replies of the last
    # one
    timed = re.findall(r"(\d+) exchanges over the side channel", "\n".join(caplog.messages))
    assert timed == [str(wanted.exchanges // 2 - 2)] * 2


# ---- nodes that fail -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AtExchange:
    """A fault of a node's process, at one exchange of a step.

    After the last one it is at the end of the step.
    """

    what: Callable[[NodeStream, RecordDict | None], object]
    index: int

    def __call__(self, message: Message) -> None:
        numbers, ask, end = count(), NodeStream.ask, NodeStream.end

        def spoiled(stream: NodeStream, reply: RecordDict) -> RecordDict:
            if next(numbers) == self.index:
                self.what(stream, reply)
            return ask(stream, reply)

        def spoiled_end(stream: NodeStream, reason: str = "") -> None:
            if next(numbers) == self.index:
                self.what(stream, None)
            end(stream, reason)

        patch.object(NodeStream, "ask", spoiled).start()
        patch.object(NodeStream, "end", spoiled_end).start()


def dies(stream: NodeStream, reply: RecordDict | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(stream: NodeStream, reply: RecordDict | None) -> None:
    raise ArithmeticError("no more of this")


def waits(stream: NodeStream, reply: RecordDict | None) -> None:
    time.sleep(1000)


def freezes(stream: NodeStream, reply: RecordDict | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def too_large(stream: NodeStream, reply: RecordDict | None) -> None:
    assert reply is not None
    ((layer, tensor),) = state.from_record(reply.array_records[REQUEST]).items()
    reply[REQUEST] = state.to_record(
        {layer: torch.full_like(tensor, torch.finfo(tensor.dtype).max / 2)}
    )


def far_too_much(stream: NodeStream, reply: RecordDict | None) -> None:
    stream._outgoing.put(bytes(2**24))


def assert_left_out(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Check that the node was named once, with the reason, and nothing went by messages."""
    named = [text for text in caplog.messages if "is left out of this round" in text]
    assert len(named) == 1
    assert re.match(rf"Node {FAULTY} is left out of this round: .*({reason})", named[0])
    assert not [text for text in caplog.messages if "by messages" in text]


@pytest.fixture(scope="module")
def survivors() -> state.State:
    return in_process(FedTAN(fraction_evaluate=0.0), without=FAULTY)[0]


def soon(message: Message) -> None:
    """Give up early, where nobody can be reached in any case."""
    side_channel_client.PATIENCE = 0.5


def away() -> Site:
    """Return a site whose firewall refuses connections to the channel."""
    (closed,) = free_ports(1)
    return Site({CERTIFICATES_VARIABLE: "none", SITE_ADDRESS_VARIABLE: f"127.0.0.1:{closed}"}, soon)


def raises_at_once(message: Message) -> None:
    if SIDE_CHANNEL in message.content:
        raise FileNotFoundError("no data")


def never_comes(message: Message) -> None:
    time.sleep(1000)


def fault(what: Any, index: int = 0) -> Callable[[], Site]:
    return lambda: Site(fault=AtExchange(what, index))


#: a node's site, what the log says of it, and seconds to connect and to answer in; what else an
#: exchange refuses is the same by messages or in frames
LEFT_OUT: dict[str, tuple[Callable[[], Site], str, float, float]] = {
    "dies": (fault(dies), "side channel broke", ENOUGH, ENOUGH),
    "dies at last": (fault(dies, EXCHANGES - 1), "side channel broke", ENOUGH, ENOUGH),
    "raises": (fault(raises), "it failed: ArithmeticError: no more of this", ENOUGH, ENOUGH),
    "sends a number that is too large": (
        fault(too_large),
        "is too large to be pooled",
        ENOUGH,
        ENOUGH,
    ),
    "sends a huge frame": (fault(far_too_much), "side channel broke", ENOUGH, ENOUGH),
    "waits": (fault(waits, EXCHANGES - 1), "it did not answer in time", ENOUGH, 20.0),
    "freezes": (
        fault(freezes, EXCHANGES - 1),
        "its side channel was silent for 15 s",
        ENOUGH,
        ENOUGH,
    ),
    "is refused": (
        away,
        "it cannot use the side channel: 127.0.0.1:.* within 0.5 s: .*refused",
        ENOUGH,
        ENOUGH,
    ),
    "fails before it comes": (lambda: Site(fault=raises_at_once), "it failed: ", ENOUGH, ENOUGH),
    "never comes": (
        lambda: Site(fault=never_comes),
        "did not connect to the side channel within 30 s",
        30.0,
        ENOUGH,
    ),
}
SLOW = ("sends a huge frame", "waits", "freezes", "never comes")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in LEFT_OUT],
)
@pytest.mark.sampled(3)
def test_a_node_that_fails_or_does_not_come_leaves_the_round_to_the_others(
    case: str, survivors: state.State, caplog: pytest.LogCaptureFixture
) -> None:
    make_site, reason, to_connect, to_answer = LEFT_OUT[case]
    strategy = FedTAN(fraction_evaluate=0.0, exchange_timeout=to_answer)
    with concurrent({PARTITION: make_site()}) as nodes:
        after, _ = run(SideChannelGrid(nodes, options(connect_timeout=to_connect)), strategy)
        # the others started again, without it
        assert len(nodes.processes()) == 2 * len(SIZES) - 1
    assert same(after, survivors)
    assert_left_out(caplog, reason)


def stops_after_the_step(message: Message) -> None:
    """Raise once the step is taken, in what is left of the round."""
    advance = SuspendedStep.advance

    def spoiled(step: SuspendedStep[Reply], answer: Answer | None = None) -> Requests:
        outcome = advance(step, answer)
        if isinstance(outcome, Requests):
            return outcome
        raise ArithmeticError("no more steps")

    patch.object(SuspendedStep, "advance", spoiled).start()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (AtExchange(dies, EXCHANGES), ""),
        (stops_after_the_step, "it failed: ArithmeticError: no more steps"),
    ],
    ids=["after the last answer", "in its other steps"],
)
def test_a_node_that_fails_after_the_exchanges_costs_it_its_vote(
    fault: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = FedTAN(fraction_evaluate=0.0)
    with concurrent({PARTITION: Site(fault=fault)}) as nodes:
        run(SideChannelGrid(nodes, options()), strategy)
        assert len(nodes.processes()) == len(SIZES)
    assert [reply.node for reply in strategy.training.replies] == [1000, 1002, 1003]
    assert_left_out(caplog, reason)


# ---- messages in place of the channel ------------------------------------------------------------


def has_no_room(message: Message) -> None:
    """Keep no step between two messages."""
    message_client.MAX_STEPS = 0


def test_a_node_that_cannot_keep_its_step_goes_on_by_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with concurrent({PARTITION: Site(fault=has_no_room)}) as nodes:
        after, _ = run(SideChannelGrid(nodes, options()), FedDNA(fraction_evaluate=0.0))
        assert len(nodes.processes()) == len(SIZES) + LAYERS, "one message more for each answer"
    assert same(after, in_process(FedDNA(fraction_evaluate=0.0))[0])
    assert not [text for text in caplog.messages if "left out" in text]


@pytest.mark.slow
def test_where_no_node_reaches_the_channel_rounds_go_by_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with concurrent({number: away() for number in range(len(SIZES))}) as nodes:
        after, _ = run(SideChannelGrid(nodes, options()), FedDNA(fraction_evaluate=0.0), 2)
    assert same(after, in_process(FedDNA(fraction_evaluate=0.0), 2)[0])
    (named,) = [text for text in caplog.messages if "by messages" in text]
    assert all(
        f"node {1000 + number}: it cannot use the side channel" in named
        for number in range(len(SIZES))
    )
    assert not [text for text in caplog.messages if "left out" in text]


def test_where_the_port_is_taken_rounds_go_by_messages(caplog: pytest.LogCaptureFixture) -> None:
    taken = socket.create_server(("", 0))
    port = taken.getsockname()[1]
    with taken:
        after, _ = run(
            SideChannelGrid(InProcessGrid(client_app(make_client), len(SIZES)), options(port=port)),
            FedTAN(fraction_evaluate=0.0),
            2,
        )
    assert same(after, in_process(FedTAN(fraction_evaluate=0.0), 2)[0])
    (named,) = [text for text in caplog.messages if "by messages" in text]
    assert named.endswith(f"port {port} cannot be had")


def test_the_port_is_open_in_a_step_only() -> None:
    channel = options()

    class Strategy(FedTAN):
        def ask(self, *given: Any) -> Any:
            before = is_open(channel.port)
            messages = super().ask(*given)
            opened.append((before, is_open(channel.port)))
            return messages

        def weigh(self, replies: Any) -> list[float]:
            opened.append(is_open(channel.port))
            return super().weigh(replies)

    opened: list[object] = []
    with concurrent() as nodes:
        run(SideChannelGrid(nodes, channel), Strategy(fraction_evaluate=0.0))
    # it weighs in the step, and again when the models are there
    assert opened == [True, (False, False), False]


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=10).close()
    except OSError:
        return False
    return True


# ---- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of two federations' servers."""
    outs = [tmp_path_factory.mktemp(name) / "federation" for name in ("one", "another")]
    for out in outs:
        assert (
            fedbn_flwr(["provision", str(ROOT / "federation.example.yaml"), "--out", str(out)]) == 0
        )
    return outs[0] / "server", outs[1] / "server"


def test_tls_with_the_deployments_certificates(
    folders: tuple[Path, Path], survivors: state.State, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = folders
    certificates = (own / "server.key").read_bytes(), (own / "server.crt").read_bytes()
    sites = {
        number: Site({CERTIFICATES_VARIABLE: str(own / "ca.crt")}) for number in range(len(SIZES))
    }
    sites[PARTITION] = Site({CERTIFICATES_VARIABLE: str(other / "ca.crt")}, soon)
    with concurrent(sites) as nodes:
        after, _ = run(
            SideChannelGrid(nodes, options(certificates=certificates)),
            FedTAN(fraction_evaluate=0.0),
        )
    assert same(after, survivors)
    assert_left_out(caplog, "cannot be reached within 0.5 s: .*CERTIFICATE_VERIFY_FAILED")


@pytest.mark.slow
def test_an_address_of_the_sites_own_must_have_the_servers_certificate(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    own, _ = folders
    certificates = (own / "server.key").read_bytes(), (own / "server.crt").read_bytes()
    channel = options(certificates=certificates)
    # by another way than the server says, to a server that has the name that it says
    through = {
        CERTIFICATES_VARIABLE: str(own / "ca.crt"),
        SITE_ADDRESS_VARIABLE: f"127.0.0.1:{channel.port}",
    }
    for address, is_let in (
        (f"fl.example.org:{channel.port}", True),
        (f"example.net:{channel.port}", False),
    ):
        caplog.clear()
        with concurrent(
            {number: Site(through, None if is_let else soon) for number in range(len(SIZES))}
        ) as nodes:
            run(
                SideChannelGrid(nodes, replace(channel, address=address)),
                FedTAN(fraction_evaluate=0.0),
            )
        assert is_let is not any("by messages" in text for text in caplog.messages)
