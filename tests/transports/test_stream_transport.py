"""A layer-wise step over a side channel whose nodes are not all at the same place."""

from types import SimpleNamespace
from typing import cast

import pytest
from flwr.serverapp import Grid

from fedbn_flwr.transports.nodes_transport import NodesFailedError
from fedbn_flwr.transports.stream_messages import Done, pack_frame
from fedbn_flwr.transports.stream_server import SideChannel
from fedbn_flwr.transports.stream_transport import StreamTransport
from tests.transports.test_stream_messages import REQUEST

DONE = pack_frame(Done())


def advance(*sent: bytes) -> dict[int, str]:
    """Let nodes say something at once; returns why nodes have failed, of a step that is at its end."""
    channel = SideChannel(range(len(sent)), "127.0.0.1:0", None)
    for link, content in zip(channel.links.values(), sent, strict=True):
        link.hear(content)
    try:
        step = StreamTransport(cast(Grid, SimpleNamespace()), [], channel, timeout=60.0)
        assert step.advance() is None
    finally:
        channel.close()
    return {node: link.failure for node, link in channel.links.items() if link.failure}


@pytest.mark.parametrize("sent", [(DONE, REQUEST), (DONE, DONE, REQUEST)])
def test_where_as_many_nodes_are_done_as_asking_the_step_is_at_its_end(sent: tuple[bytes, ...]) -> None:
    failed = advance(*sent)
    assert failed == {len(sent) - 1: "it is at a BN layer where the others are at their end"}


def test_where_more_nodes_ask_those_that_are_done_have_failed() -> None:
    with pytest.raises(NodesFailedError, match="node 0: it is at its end where the others are at a BN layer"):
        advance(DONE, REQUEST, REQUEST)
