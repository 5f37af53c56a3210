"""What the core does without: an optional package that is missing is named with the extra that brings it."""

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError):
    """A package of one of this project's extras is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import in here what an extra brings: `with extra("models"): import torchvision`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{str(error.name).partition('.')[0]} is not installed: pip install 'fedbn-flwr[{name}]'"
        ) from error
