"""The names of a message's records, which a strategy's user may choose."""

from collections.abc import Collection

from flwr.app import RecordDict

from fedbn_flwr.wire.instruction import ARRAYS, CONFIG


def record_names(content: RecordDict) -> tuple[str, str]:
    """Return the names of the model's arrays and of the configuration in a strategy's message.

    They are its `arrayrecord_key` and `configrecord_key`. What a method adds comes after the model.
    """
    arrays, configs = content.array_records, content.config_records
    return _one_of(arrays, ARRAYS), _one_of(configs, CONFIG)


def _one_of(names: Collection[str], usual: str) -> str:
    return usual if usual in names else next(iter(names), usual)
