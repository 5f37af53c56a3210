"""All that touches the insides of Flower, whose next version may have others: each function says
what it replaces, and looks for that when it is called.

What is gone and only makes a deployment sturdier is left out, with one line; what is needed
is a `DeploymentError` of one line. Both name `TRIED`, the version that had it.
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from http import HTTPStatus
from importlib import import_module
from importlib.metadata import version
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ConfigRecord, Error, Message
from flwr.common.constant import ErrorCode

from fedbn_flwr.deployment import DeploymentError
from fedbn_flwr.deployment.health import note_accepted
from fedbn_flwr.deployment.sent_log import Asked, SentLog

try:
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
except ImportError:  # those of Flower 1.42
    HEARTBEAT_DEFAULT_INTERVAL = 30
    HEARTBEAT_PATIENCE = 2

#: the newest Flower in which all of it was there
TRIED = "1.42"
#: milliseconds for which a request of the SuperLink waits for the database
PATIENCE = 60_000
#: seconds between two attempts of a node whose key is not registered yet
PAUSE = 3.0
#: seconds for which a node counts as connected after its last heartbeat
CONNECTED = HEARTBEAT_DEFAULT_INTERVAL * HEARTBEAT_PATIENCE
#: seconds for which a node is offline, so that a run finds it so: it looks for replies every three
#: seconds
OFFLINE = 10.0
#: seconds of attempts
REFUSED = CONNECTED + 2 * OFFLINE

#: why the server refuses a node, by whether it knows the node's key
_REFUSALS = {
    True: "the SuperNode before it still counts as connected",
    False: "the server does not know its key: it is not registered, or it was and has been revoked",
}
_PULL = "_pull_and_store_message"
_PUSH = "_push_messages"
_INSERT = "_insert_message"
#: what a SuperNode's messages are taken apart and put together with
_PARTS = "flwr.supercore.inflatable.inflatable_object:iterate_object_tree"
_KIND = "flwr.supercore.inflatable.inflatable_object:get_object_type_from_object_content"
_INFLATE = "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents"
_NOT_PUSHED = "flwr.supercore.inflatable.inflatable_utils:ObjectPushError"
#: in the configuration of a message
_ROUND = "server-round"


def internal(place: str) -> Any:
    """Return what Flower has at `package.module:name`; a `DeploymentError` if that is gone."""
    module, _, name = place.partition(":")
    try:
        return reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        raise DeploymentError(
            f"Flower {version('flwr')} has no {place}, which Flower {TRIED} has: install that one, "
            "or a newer version of this package"
        ) from error


@contextmanager
def _dispensable(what: str) -> Iterator[None]:
    """Say in one line what is left out because Flower has changed."""
    try:
        yield
    except DeploymentError as error:
        print(f"{error}; without it {what}", file=sys.stderr, flush=True)


def wait_longer() -> None:
    """Let every connection to the SuperLink's database that is opened from now on wait for
    `PATIENCE`.
    """
    with _dispensable("an overloaded server may lose replies: 'database is locked'"):
        pragmas = internal("flwr.supercore.sql_mixin:SQLITE_PRAGMAS")
        others = [pragma for pragma in pragmas if pragma[0] != "busy_timeout"]
        flower = import_module("flwr.supercore.sql_mixin")
        vars(flower)["SQLITE_PRAGMAS"] = (("busy_timeout", str(PATIENCE)), *others)


def start_processes(start: Callable[..., None]) -> None:
    """Let a SuperExec call `start` where Flower calls `subprocess.Popen`."""
    module = "flwr.supercore.superexec.executor.subprocess_executor"
    with _dispensable("each message waits for a new process to import torch"):
        internal(f"{module}:subprocess.Popen")
        replaced = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
        vars(import_module(module))["subprocess"] = replaced


def notice_returns() -> None:
    """Let `come_back_noticed` wrap Flower's class for the server's Fleet API."""
    with _dispensable("a run may wait for a killed node's replies until its timeout"):
        internal("flwr.supernode.fleet_http_client:FleetHttpClient.ActivateNode")
        internal("flwr.proto.fleet_pb2:ActivateNodeRequest")
        come_back_noticed(internal("flwr.supernode.fleet_http_client:FleetHttpClient"))


def come_back_noticed(client: Any) -> None:
    """Wrap `ActivateNode` of a class for the server's Fleet API.

    The server tells a run that a node has lost its messages only if the node is offline at the
    moment when the run looks for replies. One that was killed counts as connected for a minute. The
    one that is started in its place is refused so long, and then accepted at once: the run may
    never find the node offline, and waits for the lost replies until its `timeout`. So a SuperNode
    that was refused, although its key is registered, tries again only when the one before it has
    been offline for some seconds.
    """
    activate = client.ActivateNode

    def activate_noticed(self: Any, request: Any) -> Any:
        end = time.monotonic() + REFUSED
        refused = ""
        note_accepted(False)
        while True:
            try:
                accepted = activate(self, request)
            except Exception as error:
                if _answer(error) != HTTPStatus.PRECONDITION_FAILED or time.monotonic() >= end:
                    raise
                known = is_known(self, request)
                if refused != _REFUSALS[known]:
                    refused = _REFUSALS[known]
                    again = f"trying again for {REFUSED:.0f} seconds"
                    print(
                        f"Failed to activate SuperNode: {refused}; {again}",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(CONNECTED + OFFLINE if known else PAUSE)
                continue
            note_accepted(True)
            return accepted

    def is_known(self: Any, request: Any) -> bool:
        """Return whether the server knows the key: only then does it look at the interval, which
        must not be 0.
        """
        ask = internal("flwr.proto.fleet_pb2:ActivateNodeRequest")
        try:
            activate(self, ask(public_key=request.public_key, heartbeat_interval=0))
        except Exception as error:
            return _answer(error) == HTTPStatus.BAD_REQUEST
        return True

    client.ActivateNode = activate_noticed


def is_registered(address: str, key: EllipticCurvePrivateKey, certificate: bytes) -> bool:
    """Return whether the server knows a key: to a known one it refuses an interval of 0 between
    heartbeats.
    """
    import httpx

    codes = internal("flwr.supercore.error:ApiErrorCode")
    errors = internal("flwr.supercore.error:FlowerError")
    as_version = internal(
        "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor"
    )
    as_bytes = internal("flwr.supercore.primitives.asymmetric:public_key_to_bytes")
    connect = internal("flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address")
    as_node = internal("flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor")
    ask = internal("flwr.proto.fleet_pb2:ActivateNodeRequest")

    public = key.public_key()
    signed = [as_version(component_name="SuperNode"), as_node(key, public)]
    with connect(address, False, certificate, interceptors=signed) as client:
        try:
            client.ActivateNode(ask(public_key=as_bytes(public), heartbeat_interval=0))
        except httpx.HTTPStatusError as error:
            answer = errors.from_json(error.response.text)
            if answer and answer.code == codes.FLEET_INVALID_HEARTBEAT_INTERVAL:
                return True
            if answer is None or answer.code != codes.FLEET_NODE_ACTIVATION_FAILED:
                raise DeploymentError(
                    f"the server says {error.response.status_code} to this site's key"
                ) from error
        except httpx.HTTPError as error:
            raise DeploymentError(str(error)) from error
    return False


def _answer(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


class AppRefusedError(RuntimeError):
    """The run's app is none that this site allows."""


def guard_node(log: SentLog, allowed: Collection[str]) -> None:
    """Let the SuperNode record what it sends, and refuse other apps than `allowed`; empty is any.

    A `DeploymentError` says if that cannot be.
    """
    module = "flwr.supernode.start_client_internal"
    functions = [f"{module}:{name}" for name in (_PULL, _PUSH, _INSERT)]
    for place in (*functions, _PARTS, _KIND, _INFLATE, _NOT_PUSHED):
        internal(place)
    guard_internals(import_module(module), log, allowed)


def guard_internals(module: ModuleType, log: SentLog, allowed: Collection[str]) -> None:
    """Wrap the functions of Flower's module for SuperNodes."""
    apps: dict[int, str] = {}
    setattr(
        module,
        _PULL,
        _pulling(getattr(module, _PULL), getattr(module, _INSERT), log, allowed, apps),
    )
    setattr(module, _PUSH, _pushing(getattr(module, _PUSH), log))


def _pulling(
    pull: Callable[..., int | None],
    insert: Callable[..., None],
    log: SentLog,
    allowed: Collection[str],
    apps: dict[int, str],
) -> Callable[..., int | None]:
    #: the rounds that configurations name, by their ids; one that is here already does not come
    #: again
    rounds: dict[str, int] = {}

    def guarded(**given: Any) -> int | None:
        received: list[tuple[Message, Any]] = []

        def receive() -> Any:
            pulled = given["receive"]()
            received[:] = [pulled] if pulled else []
            return pulled

        def pull_object(run_id: int, object_id: str) -> bytes:
            content: bytes = given["pull_object"](run_id, object_id)
            number = round_named(object_id, content)
            if number:
                rounds[object_id] = number
            return content

        def get_fab(hash_text: str, run_id: int) -> Any:
            fab = given["get_fab"](hash_text, run_id)
            apps[run_id] = hashlib.sha256(fab.content).hexdigest()
            if allowed and apps[run_id] not in allowed:
                raise AppRefusedError(f"this site does not allow the app {apps[run_id]}")
            return fab

        try:
            return pull(
                **{**given, "receive": receive, "get_fab": get_fab, "pull_object": pull_object}
            )
        except AppRefusedError as error:
            message = received[0][0]
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=message)
            insert(reply, given["state"], given["object_store"])
            return message.metadata.run_id
        finally:
            for message, tree in received:
                metadata = message.metadata
                run = str(message.metadata.run_id)
                numbers = [
                    rounds[part.object_id]
                    for part in internal(_PARTS)(tree)
                    if part.object_id in rounds
                ]
                asked = Asked(
                    metadata.message_type,
                    max(numbers, default=0),
                    apps.get(metadata.run_id, ""),
                    run,
                )
                log.asked[metadata.message_id] = asked

    return guarded


def _pushing(push: Callable[..., None], log: SentLog) -> Callable[..., None]:
    def guarded(**given: Any) -> None:
        upload = _Upload(given["send"], given["push_object"])

        def send(message: Message, *others: Any) -> Any:
            # before it leaves: what cannot be recorded is not sent
            contents = wait_for_contents(given["object_store"], message)
            size = sum(map(len, contents.values()))
            sent = message
            if not message.has_error():
                # takes the objects out of `contents`
                sent = cast(Message, internal(_INFLATE)(message.metadata.message_id, contents))
            log.record(message, sent, size)
            return upload.send(message, *others)

        push(**{**given, "send": send, "push_object": upload.push_object})

    return guarded


class _Upload:
    """Sends a message and pushes its objects, and sends the message again if the server no longer
    expects an object.

    A SuperLink that is killed while an object arrives expects it no more when it is back: the
    object counts as pushed, and is not there. Flower gives the message up then, and the site misses
    the round. When the message is sent again, the server names the objects that it lacks.
    """

    def __init__(
        self,
        send: Callable[..., tuple[set[str], str]],
        push: Callable[[int, str, str, bytes], None],
    ) -> None:
        self._send = send
        self._push = push
        self._lock = Lock()
        self._sent: tuple[Any, ...] = ()
        self._lacking: set[str] = set()
        self._session = ""

    def send(self, *message: Any) -> tuple[set[str], str]:
        """Send a message; returns the objects that the server lacks, and under which session it
        expects them.
        """
        self._sent = message
        self._lacking, self._session = self._send(*message)
        return self._lacking, self._session

    def push_object(self, run_id: int, _: str, object_id: str, content: bytes) -> None:
        """Push an object; several threads do."""
        session = self._session
        try:
            self._push(run_id, session, object_id, content)
        except internal(_NOT_PUSHED):
            with self._lock:
                if self._session == session:
                    self.send(*self._sent)
            if object_id in self._lacking:
                self._push(run_id, self._session, object_id, content)


def wait_for_contents(store: Any, message: Message) -> dict[str, bytes]:
    """Return a message's objects by their ids, as soon as its app has handed over all of them."""
    contents = {}
    for tree in internal(_PARTS)(store.get_object_tree(message.metadata.message_id)):
        while (content := store.get(tree.object_id)) == b"":
            time.sleep(0.1)
        if content is not None:
            contents[tree.object_id] = content
    return contents


def round_named(object_id: str, content: bytes) -> int:
    """Return the round that an object of a received message names, if it is the configuration.

    It is 0 for other objects.
    """
    if internal(_KIND)(content) != ConfigRecord.__name__:
        return 0
    config = internal(_INFLATE)(object_id, {object_id: content})
    number = None
    if isinstance(config, ConfigRecord):
        number = config.get(_ROUND)
    return number if isinstance(number, int) else 0
