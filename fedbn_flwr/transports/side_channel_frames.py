"""The frames of a side channel: the content of a message or of a reply as bytes, or nothing, as a
sign of life.

Nothing that is received is believed. A frame has a bounded size, and what is in it is read as
messages are: an array's bytes are looked at before memory is taken for its numbers.
"""

from collections.abc import Iterator
from queue import Empty, SimpleQueue

from flwr.app import ConfigRecord, RecordDict

from fedbn_flwr.state.record_files import pack_records, unpack_records

#: the gRPC method that takes a stream of a node's frames, and answers with a stream of the server's
SERVICE = "fedbn.SideChannel"
METHOD = "Messages"
#: in the metadata of a node's stream
TOKEN = "token"
#: a sign of life
ALIVE = b""
#: the record of a node's last frame: its `reason` says why the node failed, and is empty if its
#: reply comes by Flower
END = "end"
REASON = "reason"
#: bytes of a frame: no BN layer has more than 65,536 channels, of two numbers of 8 bytes each
FRAME_LIMIT = 2**20 + 2**13
#: what gRPC lets through, so that a frame that is too large can be named, and not only refused
TRANSPORT_LIMIT = 4 * FRAME_LIMIT
#: seconds after which an end that has nothing to say says that it is there, and after which the
#: other end is given up
BEAT = 3.0
SILENCE = 15.0
#: characters of a reason
_LONGEST_REASON = 500


class FrameError(ValueError):
    """A frame that cannot be read, or is too large."""


def frames_to_send(outgoing: "SimpleQueue[bytes | None]") -> Iterator[bytes]:
    """Iterate over the frames of a queue until there is None, with signs of life wherever none
    comes for a while.
    """
    while True:
        try:
            frame = outgoing.get(timeout=BEAT)
        except Empty:
            frame = ALIVE
        if frame is None:
            return
        yield frame


def pack_frame(content: RecordDict) -> bytes:
    """Return the frame of a content; FrameError if it would be too large."""
    frame = pack_records(content)
    if len(frame) > FRAME_LIMIT:
        raise FrameError(
            f"a frame of {len(frame)} bytes is too large; at most {FRAME_LIMIT} are allowed"
        )
    return frame


def last_frame(reason: str = "") -> bytes:
    """Return a node's last frame."""
    text = reason[:_LONGEST_REASON].encode(errors="replace").decode()
    return pack_frame(RecordDict({END: ConfigRecord({REASON: text})}))


def read_frame(frame: bytes) -> RecordDict:
    """Return the content of a frame; FrameError if it has none."""
    if len(frame) > FRAME_LIMIT:
        raise FrameError(
            f"it sent a frame of {len(frame)} bytes; at most {FRAME_LIMIT} are allowed"
        )
    try:
        return unpack_records(frame)
    except Exception as error:  # what was sent may be anything
        raise FrameError(f"it sent a frame that cannot be read: {str(error)[:200]}") from None
