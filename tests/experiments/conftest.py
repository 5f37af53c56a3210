"""Commands draw pictures, which tests do not wait for unless they look at one."""

from collections.abc import Iterator

import pytest

from tests.helpers.registered import registries_restored


@pytest.fixture
def drawn() -> None:
    """Pictures are drawn."""


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest) -> None:
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("only_composed")


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget what a test registers or hands over."""
    with registries_restored():
        yield
