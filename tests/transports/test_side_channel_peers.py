"""Hostile peers of a side channel: nobody without a token comes in, and nothing that is sent makes
a step wait.
"""

from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.transports import side_channel_frames
from fedbn_flwr.transports.side_channel_frames import ALIVE, METHOD, SERVICE, TOKEN, last_frame
from fedbn_flwr.transports.side_channel_grid import NodeLink, SideChannel
from tests.transports.test_side_channel_frames import REQUEST

NODES = (3, 7)
#: seconds that no wait of these tests takes
LONG = 60.0


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    opened = SideChannel(NODES, "127.0.0.1:0", None)
    yield opened
    opened.close()


class Peer:
    """A client of the channel that sends whatever it is told."""

    def __init__(self, channel: SideChannel, token: str | None) -> None:
        self._connection = grpc.insecure_channel(f"127.0.0.1:{channel.port}")
        self.frames: SimpleQueue[bytes | None] = SimpleQueue()
        stream = self._connection.stream_stream(f"/{SERVICE}/{METHOD}")
        metadata = () if token is None else ((TOKEN, token),)
        self.call: Any = stream(iter(self.frames.get, None), metadata=metadata, timeout=LONG)

    def end(self) -> tuple[Any, str]:
        """Wait for the end of the stream, and return its code and details."""
        with suppress(grpc.RpcError):
            list(self.call)
        return self.call.code(), self.call.details()

    def close(self) -> None:
        self.frames.put(None)
        self._connection.close()


def wait(channel: SideChannel, node: int, is_over: Any) -> NodeLink:
    """Wait for one node."""
    link = channel.links[node]
    channel.wait(lambda each: each is not link or is_over(each), LONG)
    assert is_over(link)
    return link


def assert_not_admitted(channel: SideChannel, token: str | None) -> None:
    peer = Peer(channel, token)
    code, details = peer.end()
    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert details == "the token is unknown, used, or of an earlier attempt"
    peer.close()


def test_only_a_nodes_own_token_is_admitted_and_only_once(channel: SideChannel) -> None:
    for token in (
        None,
        "",
        "x",
        channel.tokens[3][:-1],
        channel.tokens[3] + "x",
        channel.tokens[3].swapcase(),
    ):
        assert_not_admitted(channel, token)
    assert not any(link.is_connected for link in channel.links.values())
    peer = Peer(channel, channel.tokens[3])
    wait(channel, 3, lambda link: link.is_connected)
    assert not channel.links[7].is_connected
    assert_not_admitted(channel, channel.tokens[3])
    # the second comer has not ended the first one's stream
    peer.frames.put(REQUEST)
    link = wait(channel, 3, lambda link: link.has_spoken)
    assert link.reply
    assert not link.failure
    peer.close()


def test_tokens_are_worth_nothing_after_the_attempt(channel: SideChannel) -> None:
    late = Peer(channel, channel.tokens[3])
    wait(channel, 3, lambda link: link.is_connected)
    channel.close()
    assert late.end() == (grpc.StatusCode.ABORTED, "the attempt is over")
    assert channel._admit(channel.tokens[7]) is None
    late.close()


def test_tokens_differ_and_are_kept_as_digests_only(channel: SideChannel) -> None:
    assert len({*channel.tokens.values()}) == len(NODES)
    assert not {token.encode() for token in channel.tokens.values()} & channel._awaited.keys()
    assert all(len(digest) == 32 for digest in channel._awaited)


NOT_DUE = "it sent a frame where none is due"


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        ([REQUEST, REQUEST], NOT_DUE),
        ([REQUEST, last_frame()], NOT_DUE),
        ([REQUEST, last_frame("ConnectionError: silence")], "ConnectionError: silence"),
        ([last_frame()], ""),
    ],
    ids=[
        "two replies",
        "an end after a reply",
        "a failure while it waits",
        "an end, after which nothing counts",
    ],
)
def test_how_a_node_may_end_its_stream(
    sent: list[bytes], failure: str, channel: SideChannel
) -> None:
    peer = Peer(channel, channel.tokens[3])
    for frame in sent:
        peer.frames.put(frame)
    link = wait(channel, 3, lambda link: link.failure or link.is_done)
    code = grpc.StatusCode.ABORTED if failure else grpc.StatusCode.OK
    assert peer.end() == (code, failure)
    peer.close()
    assert link.failure == failure


def test_silence_ends_a_wait_that_would_be_longer(
    channel: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel_frames, "SILENCE", 0.5)
    peer = Peer(channel, channel.tokens[3])
    wait(channel, 3, lambda link: link.is_connected)
    assert not channel.wait(lambda link: link.has_spoken, 1.0)
    assert channel.links[3].failure == "its side channel was silent for 0.5 s"
    peer.close()


#: what a node may send, in any order
SENT = st.one_of(st.binary(max_size=60), st.sampled_from([ALIVE, REQUEST]))


@settings(max_examples=30, deadline=None)
@given(st.lists(SENT, max_size=5))
def test_whatever_a_node_sends_it_has_spoken_or_failed(sent: list[bytes]) -> None:
    opened = SideChannel((1,), "127.0.0.1:0", None)
    peer = Peer(opened, opened.tokens[1])
    for content in sent:
        peer.frames.put(content)
    peer.frames.put(None)
    link = wait(opened, 1, lambda link: link.has_spoken)
    assert link.reply is not None or link.failure or link.is_done
    peer.close()
    opened.close()
