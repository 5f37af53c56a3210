"""A SuperNode that records what it sends, and runs only the apps that its site allows.

Flower's SuperNode pulls and pushes messages in two functions of its own, around which these wrap.
"""

import hashlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from fedbn_flwr.deployment.errors import DeploymentError
from fedbn_flwr.deployment.sent_log import Asked, SentLog, round_of, wait_for_contents

_PULL, _PUSH, _INSERT = "_pull_and_store_message", "_push_messages", "_insert_message"


class AppRefusedError(RuntimeError):
    """The run's app is none that this site allows."""


def guard(module: ModuleType, log: SentLog, allowed: Collection[str]) -> None:
    """Wrap the functions of Flower's module `flwr.supernode.start_client_internal`; `allowed` empty is any app."""
    if lacking := [name for name in (_PULL, _PUSH, _INSERT) if not hasattr(module, name)]:
        raise DeploymentError(f"this version of Flower's SuperNode has no {lacking[0]}: nothing could be recorded")
    apps: dict[int, str] = {}
    setattr(module, _PULL, _pulling(getattr(module, _PULL), getattr(module, _INSERT), log, allowed, apps))
    setattr(module, _PUSH, _pushing(getattr(module, _PUSH), log))


def _pulling(
    pull: Callable[..., int | None],
    insert: Callable[..., None],
    log: SentLog,
    allowed: Collection[str],
    apps: dict[int, str],
) -> Callable[..., int | None]:
    #: the rounds that configurations name, by their ids; one that is here already does not come again
    rounds: dict[str, int] = {}

    def guarded(**given: Any) -> int | None:
        received: list[tuple[Message, Any]] = []
        objects = _NotedObjects(given["object_store"], rounds)

        def receive() -> Any:
            pulled = given["receive"]()
            received[:] = [pulled] if pulled else []
            return pulled

        def get_fab(hash_text: str, run_id: int) -> Any:
            fab = given["get_fab"](hash_text, run_id)
            apps[run_id] = hashlib.sha256(fab.content).hexdigest()
            if allowed and apps[run_id] not in allowed:
                raise AppRefusedError(f"this site does not allow the app {apps[run_id]}")
            return fab

        try:
            return pull(**{**given, "receive": receive, "get_fab": get_fab, "object_store": objects})
        except AppRefusedError as error:
            message = received[0][0]
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=message)
            insert(reply, given["state"], given["object_store"])
            return message.metadata.run_id
        finally:
            for message, tree in received:
                metadata = message.metadata
                numbers = [rounds[part.object_id] for part in iterate_object_tree(tree) if part.object_id in rounds]
                asked = Asked(metadata.message_type, max(numbers, default=0), apps.get(metadata.run_id, ""))
                log.asked[metadata.message_id] = asked

    return guarded


def _pushing(push: Callable[..., None], log: SentLog) -> Callable[..., None]:
    def guarded(**given: Any) -> None:
        def send(message: Message, *others: Any) -> Any:
            # before it leaves: what cannot be recorded is not sent
            log.record(message, wait_for_contents(given["object_store"], message))
            return given["send"](message, *others)

        push(**{**given, "send": send})

    return guarded


class _NotedObjects:
    """An object store that notes the rounds in what is put into it."""

    def __init__(self, store: Any, rounds: dict[str, int]) -> None:
        self._store, self._rounds = store, rounds

    def put(self, object_id: str, content: bytes) -> None:
        """Note and pass on."""
        if number := round_of(object_id, content):
            self._rounds[object_id] = number
        self._store.put(object_id, content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
