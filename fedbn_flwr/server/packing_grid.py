"""A grid that packs arrays for the nodes that can unpack them."""

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.wire.packed import Packed, asking, is_packed, pack, unpack, with_content


class PackingGrid(PassingGrid):
    """A grid in front of another one, which sends a message's arrays as a few long ones
    (`fedbn_flwr.wire.packed`).

    The first message to a node only asks for a packed reply. A node whose app does not know what
    that is replies as always, and gets all messages as they are.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        #: the nodes that have replied with packed arrays
        self._knowing: set[int] = set()

    def incoming(self, replies: list[Message]) -> list[Message]:
        """Return the replies, unpacked."""
        return [self._unpacked(reply) for reply in replies]

    def outgoing(self, messages: list[Message]) -> list[Message]:
        """Return the messages of a push, packed where the node can unpack them.

        A model that several messages share is packed once.
        """
        known: dict[int, Packed] = {}
        sent = []
        for message in messages:
            if message.metadata.dst_node_id in self._knowing:
                content = pack(message.content, known)
            else:
                content = asking(message.content)
            sent.append(with_content(message, content))
        return sent

    def _unpacked(self, reply: Message) -> Message:
        if reply.has_error() or not is_packed(reply.content):
            return reply
        self._knowing.add(reply.metadata.src_node_id)
        try:
            return with_content(reply, unpack(reply.content))
        except ValueError as error:
            broken = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"it sent {error}")
            return Message(metadata=reply.metadata, error=broken)  # type: ignore[call-overload,no-any-return]
