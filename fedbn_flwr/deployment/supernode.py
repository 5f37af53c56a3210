"""Flower's SuperNode, which ends when it can no longer take part.

A restart policy then brings it back.

It records what it sends in the file `FEDBN_SITE_LOG`. Where `FEDBN_APPS` names hashes, no other
apps run. Flower's own command lives on without its loop or its heartbeat after an unexpected error:
the process is alive and the node offline for ever. Takes the arguments of `flower-supernode`.

Where `FEDBN_EXCHANGE` names the server's side channel, the apps of the site reach it through this
process, the only one of a site that talks to the server.
"""

import os
import re
import sys
import threading
import traceback
from importlib.metadata import entry_points
from pathlib import Path

from fedbn_flwr.deployment import DeploymentError, host_and_port
from fedbn_flwr.deployment.flower_internals import guard_node, notice_returns
from fedbn_flwr.deployment.relay import start_relay
from fedbn_flwr.deployment.sent_log import SentLog

#: the address of the server's side channel, HOST:PORT
EXCHANGE_VARIABLE = "FEDBN_EXCHANGE"
#: the exit code when the SuperNode stopped taking part
STOPPED = 1
#: the file for what leaves the site, and the hashes of the apps that may run here
LOG_VARIABLE = "FEDBN_SITE_LOG"
APPS_VARIABLE = "FEDBN_APPS"
#: the SHA-256 of an app's bundle
_HASH = re.compile("[0-9a-f]{64}")


def main() -> None:
    """Run a SuperNode until it is told to end, or has failed."""
    threading.excepthook = _end
    log = SentLog(Path(os.environ[LOG_VARIABLE]) if os.environ.get(LOG_VARIABLE) else None)
    target = os.environ.get(EXCHANGE_VARIABLE)
    try:
        _guard(log)
        if target:
            host_and_port(EXCHANGE_VARIABLE, target)
    except DeploymentError as error:
        sys.exit(f"the SuperNode does not start: {error}")
    if target:
        # where the SuperNode listens for the apps of its site
        hosts = [
            "127.0.0.1",
            *(word.partition("=")[2] for word in sys.argv if word.startswith("--host=")),
        ]
        start_relay(hosts[-1], target, record=log.record_stream)
    notice_returns()
    (command,) = entry_points(group="console_scripts", name="flower-supernode")
    command.load()()
    # only reached when the loop has ended by an error: a SuperNode is stopped by a signal
    print("the SuperNode has lost its loop: ending its process", file=sys.stderr, flush=True)
    os._exit(STOPPED)


def _guard(log: SentLog) -> None:
    """Let Flower's functions keep the log, and refuse apps as the environment says."""
    apps = os.environ.get(APPS_VARIABLE, "").replace(",", " ").split()
    wrong = [app for app in apps if not _HASH.fullmatch(app)]
    if wrong:
        raise DeploymentError(
            f"{APPS_VARIABLE} must be hashes of 64 hexadecimal digits, got {wrong[0]!r}"
        )
    if apps or os.environ.get(LOG_VARIABLE):
        guard_node(log, apps)


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process when any of its threads fails; the heartbeat is one."""
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    print("a thread of the SuperNode has failed: ending its process", file=sys.stderr, flush=True)
    os._exit(STOPPED)


if __name__ == "__main__":
    main()
