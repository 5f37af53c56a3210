"""A SuperNode that was killed and comes back: the server is made to notice that the one before it is gone."""

import sys
import time
from http import HTTPStatus
from typing import Any

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.proto.fleet_pb2 import DeactivateNodeRequest

from fedbn_flwr.deployment.health import note_accepted

#: seconds between two attempts
PAUSE = 3.0
#: seconds for which a node stays offline, so that a run finds it so: it looks for replies every three seconds
OFFLINE = 10.0
#: seconds of attempts: a SuperNode that is gone counts as connected nearly so long
REFUSED = HEARTBEAT_DEFAULT_INTERVAL * HEARTBEAT_PATIENCE + 2 * OFFLINE

_REFUSAL = (
    "Failed to activate SuperNode: its key is not registered, or the SuperNode before it still counts as connected; "
    f"trying again for {REFUSED:.0f} seconds"
)


def come_back_noticed(client: Any) -> None:
    """Wrap `ActivateNode` of `client`, Flower's class for the server's Fleet API.

    The server tells a run that a node has lost its messages only if the node is offline at the moment when the run
    looks for replies. One that was killed counts as connected for a minute. The one that is started in its place is
    refused so long, and then accepted at once: the run may never find the node offline, and waits for the lost replies
    until its `timeout`. So a SuperNode that was refused goes offline once more before it takes part.
    """
    activate = client.ActivateNode

    def activate_noticed(self: Any, request: Any) -> Any:
        end, refused = time.monotonic() + REFUSED, False
        note_accepted(False)
        while True:
            try:
                accepted = activate(self, request)
            except Exception as error:
                if not _is_refusal(error) or time.monotonic() >= end:
                    raise
                if not refused:
                    print(_REFUSAL, file=sys.stderr, flush=True)
                refused = True
                time.sleep(PAUSE)
                continue
            if not refused:
                note_accepted(True)
                return accepted
            self.DeactivateNode(DeactivateNodeRequest(node_id=accepted.node_id))
            time.sleep(OFFLINE)
            refused = False

    client.ActivateNode = activate_noticed


def _is_refusal(error: Exception) -> bool:
    answer = getattr(error, "response", None)
    return getattr(answer, "status_code", None) == HTTPStatus.PRECONDITION_FAILED
