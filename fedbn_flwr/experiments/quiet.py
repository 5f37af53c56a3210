"""What runs need of this process, which is as it was afterwards: fewer lines in the log, and torch's threads."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: evaluation is the server's; `run_simulation` is the only way to start a simulation from Python; and the command
#: measures models that stay on nodes by itself
_NORMAL = (
    "Federated evaluation will be skipped",
    "`run_simulation` function is deprecated",
    "that stay on the nodes and were not trained",
)


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Hide Flower's lines about every round, and its warnings of what is the normal case here, inside the block.

    Runs set torch's threads; after the block there are as many as before.
    """
    logger, threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = logger.level

    def is_news(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NORMAL)

    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
        logger.setLevel(level)
        torch.set_num_threads(threads)
