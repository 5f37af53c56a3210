"""A SuperNode that records what it sends, and runs only the apps that its site allows.

Flower's SuperNode pulls and pushes messages in two functions of its own, around which these wrap.
"""

import hashlib
from collections.abc import Callable, Collection
from threading import Lock
from types import ModuleType
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

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
        upload = _Upload(given["send"], given["push_object"])

        def send(message: Message, *others: Any) -> Any:
            # before it leaves: what cannot be recorded is not sent
            log.record(message, wait_for_contents(given["object_store"], message))
            return upload.send(message, *others)

        push(**{**given, "send": send, "push_object": upload.push_object})

    return guarded


class _Upload:
    """Sends a message and pushes its objects, and sends the message again if the server no longer expects an object.

    A SuperLink that is killed while an object arrives expects it no more when it is back: the object counts as pushed,
    and is not there. Flower gives the message up then, and the site misses the round. When the message is sent again,
    the server names the objects that it lacks.
    """

    def __init__(self, send: Callable[..., tuple[set[str], str]], push: Callable[[int, str, str, bytes], None]) -> None:
        self._send, self._push = send, push
        self._lock = Lock()
        self._sent: tuple[Any, ...] = ()
        self._lacking: set[str] = set()
        self._session = ""

    def send(self, *message: Any) -> tuple[set[str], str]:
        """Send a message; returns the objects that the server lacks, and under which session it expects them."""
        self._sent = message
        self._lacking, self._session = self._send(*message)
        return self._lacking, self._session

    def push_object(self, run_id: int, _: str, object_id: str, content: bytes) -> None:
        """Push an object; several threads do."""
        session = self._session
        try:
            self._push(run_id, session, object_id, content)
        except ObjectPushError:
            with self._lock:
                if self._session == session:
                    self.send(*self._sent)
            if object_id in self._lacking:
                self._push(run_id, self._session, object_id, content)


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
