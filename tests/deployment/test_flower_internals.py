"""Each part of Flower's insides that the deployment uses is there, and is missed in one line when it
is gone.
"""

from collections.abc import Callable
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE

from fedbn_flwr.deployment import DeploymentError, flower_internals
from fedbn_flwr.deployment.sent_log import SentLog
from fedbn_flwr.server import grids
from fedbn_flwr.server.replies import CannotTrainError
from fedbn_flwr.state import records
from fedbn_flwr.state.flat import FlatArrays


def ask_server() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    flower_internals.is_registered("127.0.0.1:9", key, b"")


def guard() -> None:
    flower_internals.guard_node(SentLog(None), ())


def start() -> None:
    flower_internals.start_processes(lambda *_: None)


#: by what uses them, the places that a newer Flower may not have
DISPENSABLE: dict[Callable[[], None], tuple[str, ...]] = {
    flower_internals.wait_longer: ("flwr.supercore.sql_mixin:SQLITE_PRAGMAS",),
    start: ("flwr.supercore.superexec.executor.subprocess_executor:subprocess",),
    flower_internals.notice_returns: (
        "flwr.supernode.fleet_http_client:FleetHttpClient.ActivateNode",
        "flwr.supernode.fleet_http_client:FleetHttpClient",
        "flwr.proto.fleet_pb2:ActivateNodeRequest",
    ),
}
NEEDED: dict[Callable[[], None], tuple[str, ...]] = {
    ask_server: (
        "flwr.supercore.error:ApiErrorCode",
        "flwr.supercore.error:FlowerError",
        "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor",
        "flwr.supercore.primitives.asymmetric:public_key_to_bytes",
        "flwr.supernode.fleet_http_client:FleetHttpClient",
        "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor",
        "flwr.proto.fleet_pb2:ActivateNodeRequest",
    ),
    guard: (
        "flwr.supernode.start_client_internal:_insert_message",
        "flwr.supernode.start_client_internal:_pull_and_store_message",
        "flwr.supernode.start_client_internal:_push_messages",
        "flwr.supercore.inflatable.inflatable_object:get_object_type_from_object_content",
        "flwr.supercore.inflatable.inflatable_object:iterate_object_tree",
        "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents",
        "flwr.supercore.inflatable.inflatable_utils:ObjectPushError",
    ),
}


def places(
    users: dict[Callable[[], None], tuple[str, ...]],
) -> list[tuple[Callable[[], None], str]]:
    return [(user, place) for user, all_places in users.items() for place in all_places]


def remove(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = place.partition(":")
    *path, last = name.split(".")
    monkeypatch.delattr(reduce(getattr, path, import_module(module)), last)


@pytest.mark.parametrize(
    "place",
    [
        *dict.fromkeys(place for _, place in places({**DISPENSABLE, **NEEDED})),
        "flwr.supercore.superexec.executor.subprocess_executor:subprocess.Popen",
        "flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address",
    ],
)
def test_flower_has_it(place: str) -> None:
    assert flower_internals.internal(place)


def test_a_node_counts_as_connected_as_long_as_flower_says() -> None:
    assert flower_internals.CONNECTED == HEARTBEAT_DEFAULT_INTERVAL * HEARTBEAT_PATIENCE


@pytest.mark.parametrize(("user", "place"), places(DISPENSABLE))
def test_what_is_dispensable_and_gone_is_left_out_with_one_line(
    user: Callable[[], None],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    remove(place, monkeypatch)
    user()
    said = capsys.readouterr().err
    assert said.startswith(f"Flower {version('flwr')} has no {place}")
    assert "without it" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("user", "place"), places(NEEDED))
def test_what_is_needed_and_gone_is_refused_with_one_line(
    user: Callable[[], None], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(place, monkeypatch)
    with pytest.raises(DeploymentError, match=f"has no {place}.*, which Flower 1.42 has") as error:
        user()
    assert "\n" not in str(error.value)


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeploymentError, match=r"has no flwr\.nowhere:name, which Flower 1\.42 has"):
        flower_internals.internal("flwr.nowhere:name")


class Elsewhere(dict[str, Array]):
    """A record without `_data`."""


def test_records_that_keep_their_arrays_elsewhere_are_filled_in_the_public_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "ArrayRecord", Elsewhere)
    state = FlatArrays.copy_of({"weight": np.arange(3.0), "bias": np.ones(2)})
    record = records.record_of(state)
    assert records.flat_of(record) is None
    lent = records.lend_record(record)
    made = records.make_record(dict(lent.items()))
    assert np.array_equal(made["weight"].numpy(), np.arange(3.0))


def test_messages_that_keep_their_ids_elsewhere_are_refused_with_one_line() -> None:
    message = SimpleNamespace(metadata=SimpleNamespace(message_id="1"))
    with pytest.raises(CannotTrainError, match=r"elsewhere than Flower 1\.42"):
        grids.identify(cast(Message, message))
