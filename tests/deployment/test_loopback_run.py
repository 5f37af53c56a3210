"""A server and two sites as plain processes on the loopback, from the compose file: TLS, node keys, same bits."""

import ssl
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.helpers.federation import OPTIONS, assert_same_results
from tests.helpers.loopback import LoopbackFederation, has_proxy

pytestmark = pytest.mark.xdist_group("deployment")


def test_a_run_has_the_bits_of_one_in_process(loopback: LoopbackFederation, tmp_path: Path) -> None:
    assert_same_results(*loopback.both({**OPTIONS, "method": "fedavg", "rounds": 1}, tmp_path))


@pytest.mark.skipif(not has_proxy(), reason="nginx is not installed")
@pytest.mark.parametrize("path", ["/v1/control/list-runs", "/v1/runtime/acquire-task", "/results/"])
def test_the_sites_port_leads_to_the_fleet_api_only(loopback: LoopbackFederation, path: str) -> None:
    context = ssl.create_default_context(cafile=loopback.kit("north") / "ca.crt")
    request = Request(f"https://127.0.0.1:{loopback.port}{path}", method="POST")
    with pytest.raises(HTTPError) as error:
        urlopen(request, context=context)
    assert error.value.code == 403
