"""Commands draw pictures, which tests do not wait for unless they look at one."""

import pytest


@pytest.fixture
def drawn() -> None:
    """Pictures are drawn."""


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest) -> None:
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("only_composed")
