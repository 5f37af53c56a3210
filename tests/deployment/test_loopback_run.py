"""A server and two sites as plain processes on the loopback, from the compose file: TLS, node keys,
same bits.
"""

from pathlib import Path

import pytest

from tests.helpers.federation import OPTIONS, assert_same_results
from tests.helpers.loopback import LoopbackFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


def test_a_run_has_the_bits_of_one_in_process(loopback: LoopbackFederation, tmp_path: Path) -> None:
    assert_same_results(
        *loopback.both(
            {**OPTIONS, "method": "fedavg", "statistics": "exact", "rounds": 1}, tmp_path
        )
    )
