"""The ServerApp of the root, in one process."""

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from apps.client import app as client
from apps.server import app as server
from fedbn_flwr.simulation.in_process import InProcessGrid


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dataset": "nonsense"}, "unknown data set 'nonsense'"),
        ({"lr": 1e30, "rounds": 1}, "training diverged"),
    ],
)
def test_a_run_that_cannot_work_ends_with_one_line_in_flowers_log(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "model": "mlp",
        "clients": 2,
        "local-steps": 2,
        "results-dir": str(tmp_path / "run"),
        **options,
    }
    with pytest.raises(Exception, match=named) as error:
        server(InProcessGrid(client, 2, given), Context(1, 1, {}, RecordDict(), given))
    # as Flower logs it
    record = logging.LogRecord(
        "flwr", logging.ERROR, "", 0, "ServerApp raised an exception", (), None
    )
    record.exc_info = (type(error.value), error.value, error.value.__traceback__)
    lines = logging.Formatter().format(record).splitlines()
    assert len(lines) == 2
    assert named in lines[1]
