"""A server and two sites as plain processes on the loopback, from the compose file: TLS, node keys,
same bits.
"""

from pathlib import Path

import pytest

from tests.helpers.federation import OPTIONS, assert_same_results
from tests.helpers.loopback import LoopbackFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


@pytest.mark.parametrize(
    "asked", [{"method": "fedavg", "statistics": "exact"}, {"method": "fed3r-personal"}]
)
def test_a_run_has_the_bits_of_one_in_process(
    asked: dict[str, str], loopback: LoopbackFederation, tmp_path: Path
) -> None:
    assert_same_results(*loopback.both({**OPTIONS, **asked, "rounds": 1}, tmp_path))
