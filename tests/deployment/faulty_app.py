"""A ClientApp with faults, which takes the place of `apps/client.py` in a copy of the app.

`faults.json` in the folder `FOLDER` lists the faults of a run, each with its name and the
`partition`, the `round` and, in a layer-wise step, the `exchange` in which it happens.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedbn_flwr import wire
from fedbn_flwr.clientapp import client_app, keep_states
from fedbn_flwr.experiments import client_fn
from fedbn_flwr.transports.message_records import POSITION, StepPosition

FOLDER = Path("@FOLDER@")
#: bytes of an array that nobody asked for
LARGE = 200 * 2**20


def hold(partition: int) -> None:
    """Say which process answers, and wait until the test lets it go on or kills it."""
    name = FOLDER / f"held-{partition}"
    name.with_suffix(".partial").write_text(str(os.getpid()))
    name.with_suffix(".partial").rename(name)
    while name.exists():
        time.sleep(0.1)


def _add_large_array(reply: Message) -> None:
    record = reply.content.array_records[wire.ARRAYS]
    reply.content[wire.ARRAYS] = ArrayRecord({**record, "large": Array(np.zeros(LARGE, np.uint8))})


class FaultyApp(ClientApp):
    """Answers as the project's app, except where a fault is due."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        partition = int(context.node_config["partition-id"])
        due = {
            fault["name"]
            for fault in _listed()
            if fault["partition"] == partition and _is_due(fault, message)
        }
        if "hold" in due:
            hold(partition)
        reply = _APP(message, context)
        if "large" in due:
            _add_large_array(reply)
        return reply


def _listed() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads((FOLDER / "faults.json").read_text())
    return listed


def _is_due(fault: dict[str, Any], message: Message) -> bool:
    if message.metadata.message_type not in ("train", wire.LAYERWISE):
        return False
    exchange = StepPosition.of(message.content).index if POSITION in message.content else None
    now = message.content.config_records[wire.CONFIG]["server-round"], exchange
    return now == (fault["round"], fault.get("exchange"))


_APP = client_app(client_fn, mods=[keep_states])
app = FaultyApp()
