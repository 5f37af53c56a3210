"""A federation of two sites on the loopback, which all tests of a deployment share."""

from collections.abc import Iterator

import pytest

from tests.helpers.loopback import LoopbackFederation


@pytest.fixture(scope="session")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackFederation]:
    with LoopbackFederation(tmp_path_factory.mktemp("loopback"), ("north", "south")) as federation:
        federation.register()
        yield federation
