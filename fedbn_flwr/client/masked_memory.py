"""What a node remembers of sums under masks, and where its site says what it expects of them."""

import hashlib
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.wire import masked

#: the folder with a site's signing key (`sign.key`) and the public keys of all sites (`sites.txt`)
SITE_VARIABLE = "FEDBN_FLWR_SECURE_SITE"
#: the smallest sum that a site takes part in, if it is more than the default
MINIMUM_VARIABLE = "FEDBN_FLWR_SECURE_MIN"
MINIMUM = 3

_KEPT = "secure"
#: what a node's memory calls the steps that it has taken
_PROGRESS = ("step ", "gathered ")


class Kept:
    """What a node remembers of sums under masks, in its `Context.state`."""

    def __init__(self, context: Context) -> None:
        self._memory = Memory(context.state)
        self._values: dict[str, Any] = dict(next((dict(record) for _, record in self._memory.kept(_KEPT)), {}))

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def get(self, key: str, default: Any) -> Any:
        """Return a value, or what there is in its place."""
        return self._values.get(key, default)

    def update(self, **values: Any) -> None:
        """Remember values."""
        self._values |= values
        self._memory.keep(_KEPT, ConfigRecord(dict(self._values)))

    def begin(self, **values: Any) -> None:
        """Forget everything but how far this node is in the run, and remember values."""
        self._values = {key: value for key, value in self._values.items() if key.startswith(_PROGRESS)}
        self.update(**values)


def fresh_seed(seed: int, attempt: int, content: RecordDict, context: Context) -> int:
    """Return the seed of a layer-wise step's mini-batches: of later attempts, one that only this node knows.

    Otherwise the sums of two attempts would differ by what a node that is lost has sent.
    """
    if masked.SECURE not in content or attempt < 2:
        return seed
    secret = Kept(context)["private"] + f"{seed} {attempt}".encode()
    return int.from_bytes(hashlib.sha256(secret).digest()[:7], "big")
