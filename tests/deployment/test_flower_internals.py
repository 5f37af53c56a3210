"""What the deployment replaces or calls in Flower is there.

Each name says with which version it was tried.
"""

from functools import reduce
from importlib import import_module
from importlib.metadata import version

import pytest

from fedbn_flwr.deployment import flower_internals

TRIED = {
    "flwr.supercore.sql_mixin:SQLITE_PRAGMAS": "1.42.0",
    "flwr.supercore.superexec.executor.subprocess_executor:subprocess.Popen": "1.42.0",
    "flwr.supercore.superexec.executor.subprocess_executor:subprocess.DEVNULL": "1.42.0",
    "flwr.supernode.fleet_http_client:FleetHttpClient.ActivateNode": "1.42.0",
    "flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address": "1.42.0",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": "1.42.0",
    "flwr.supernode.start_client_internal:_insert_message": "1.42.0",
    "flwr.supernode.start_client_internal:_pull_and_store_message": "1.42.0",
    "flwr.supernode.start_client_internal:_push_messages": "1.42.0",
}


@pytest.mark.parametrize("place", TRIED)
def test_flower_has_what_is_replaced(place: str) -> None:
    module, _, name = place.partition(":")
    failure = f"tried with Flower {TRIED[place]}, here is {version('flwr')}"
    try:
        reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{error}: {failure}")


def test_the_module_says_with_which_version_it_was_tried() -> None:
    (tried,) = set(TRIED.values())
    assert f"Tried with Flower {tried.removesuffix('.0')}," in (flower_internals.__doc__ or "")
