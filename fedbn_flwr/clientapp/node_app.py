"""The base of ClientApps: what happens to a message before a handler sees it, and to a reply before it leaves."""

import os
from collections.abc import Sequence
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr import wire
from fedbn_flwr.client.masked_carried import for_pool, with_corrections
from fedbn_flwr.client.masked_memory import SITE_VARIABLE
from fedbn_flwr.clientapp.mods import ClientAppCallable, Mod, is_outermost
from fedbn_flwr.secure import NotEncodableError, ProtocolError
from fedbn_flwr.wire import masked
from fedbn_flwr.wire.packed import PACKED, pack, unpack, with_content


class NodeApp(ClientApp):
    """Flower's ClientApp, which unpacks and packs arrays, and masks a reply where the server asks for a sum.

    Mods that are `outermost` see every message, also those that no handler does, and what was remembered until the end.
    """

    def __init__(self, client_fn: Any = None, mods: Sequence[Mod] | None = None) -> None:
        self._outer = [mod for mod in mods or () if is_outermost(mod)]
        super().__init__(client_fn, [mod for mod in mods or () if not is_outermost(mod)])

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        answer: ClientAppCallable = self._answer
        for mod in reversed(self._outer):
            answer = _around(answer, mod)
        if PACKED not in message.content:
            return answer(message, context)
        reply = answer(with_content(message, unpack(message.content)), context)
        return with_content(reply, pack(reply.content)) if reply.has_content() else reply

    def _answer(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind == masked.SECURE_QUERY:
            # cryptography takes a while to import
            from fedbn_flwr.client.masking import answer_query

            return _refusing(lambda: Message(answer_query(message, context), reply_to=message), message)

        def answered() -> Message:
            if kind == masked.CARRIED_QUERY:
                return Message(for_pool(message, context), reply_to=message)
            return ClientApp.__call__(self, self.enter(message, context), context)

        return self.leave(_refusing(answered, message), message, context)

    def enter(self, message: Message, context: Context) -> Message:
        """Return what handlers get in the place of a message."""
        if masked.SECURE not in message.content or wire.CARRIED not in message.content:
            return message
        return with_content(message, with_corrections(message.content, context))

    def leave(self, reply: Message, message: Message, context: Context) -> Message:
        """Return what leaves the node in place of a reply."""
        if not reply.has_content() or not (masked.SECURE in message.content or os.environ.get(SITE_VARIABLE)):
            return reply
        from fedbn_flwr.client.masking import leave_masked

        def hidden() -> Message:
            content = leave_masked(reply.content, message, context)
            return reply if content is reply.content else Message(content, reply_to=message)

        return _refusing(hidden, message)


def _around(answer: ClientAppCallable, mod: Mod) -> ClientAppCallable:
    return lambda message, context: mod(message, context, answer)


def _refusing(answer: Any, message: Message) -> Message:
    """Answer, or say in one line why not: Flower would show a traceback."""
    try:
        result: Message = answer()
        return result
    except (ProtocolError, NotEncodableError) as error:
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
