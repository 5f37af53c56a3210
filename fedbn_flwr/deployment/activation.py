"""A SuperNode that was killed and comes back: the server is made to notice that the one before it is gone."""

import sys
import time
from http import HTTPStatus
from typing import Any

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from fedbn_flwr.deployment.health import note_accepted

#: seconds between two attempts of a node whose key is not registered yet
PAUSE = 3.0
#: seconds for which a node counts as connected after its last heartbeat
CONNECTED = HEARTBEAT_DEFAULT_INTERVAL * HEARTBEAT_PATIENCE
#: seconds for which a node is offline, so that a run finds it so: it looks for replies every three seconds
OFFLINE = 10.0
#: seconds of attempts
REFUSED = CONNECTED + 2 * OFFLINE

_REFUSAL = (
    "Failed to activate SuperNode: its key is not registered, or the SuperNode before it still counts as connected; "
    f"trying again for {REFUSED:.0f} seconds"
)


def come_back_noticed(client: Any) -> None:
    """Wrap `ActivateNode` of `client`, Flower's class for the server's Fleet API.

    The server tells a run that a node has lost its messages only if the node is offline at the moment when the run
    looks for replies. One that was killed counts as connected for a minute. The one that is started in its place is
    refused so long, and then accepted at once: the run may never find the node offline, and waits for the lost replies
    until its `timeout`. So a SuperNode that was refused, although its key is registered, tries again only when the one
    before it has been offline for some seconds.
    """
    activate = client.ActivateNode

    def activate_noticed(self: Any, request: Any) -> Any:
        end, refused = time.monotonic() + REFUSED, False
        note_accepted(False)
        while True:
            try:
                accepted = activate(self, request)
            except Exception as error:
                if _answer(error) != HTTPStatus.PRECONDITION_FAILED or time.monotonic() >= end:
                    raise
                if not refused:
                    print(_REFUSAL, file=sys.stderr, flush=True)
                refused = True
                time.sleep(CONNECTED + OFFLINE if is_registered(self, request) else PAUSE)
                continue
            note_accepted(True)
            return accepted

    def is_registered(self: Any, request: Any) -> bool:
        """Return whether the server knows the key: only then does it look at the interval, which must not be 0."""
        try:
            activate(self, ActivateNodeRequest(public_key=request.public_key, heartbeat_interval=0))
        except Exception as error:
            return _answer(error) == HTTPStatus.BAD_REQUEST
        return True

    client.ActivateNode = activate_noticed


def _answer(error: Exception) -> int | None:
    """Return the status that the server has answered with, if it has."""
    return getattr(getattr(error, "response", None), "status_code", None)
