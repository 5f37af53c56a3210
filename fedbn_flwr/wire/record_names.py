"""The names of a message's records, which a strategy's user may choose."""

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr.wire.instruction import ARRAYS, CONFIG


def record_names(content: RecordDict) -> tuple[str, str]:
    """Return the names of the model's arrays and of the configuration in a strategy's message.

    They are its `arrayrecord_key` and `configrecord_key`. What a method adds comes after the model.
    """
    return _one_of(content, ArrayRecord, ARRAYS), _one_of(content, ConfigRecord, CONFIG)


def _one_of(content: RecordDict, kind: type[ArrayRecord | ConfigRecord], usual: str) -> str:
    # `content.array_records` takes ten times as long, and every message is asked
    if isinstance(content.get(usual), kind):
        return usual
    return next((name for name, record in content.items() if isinstance(record, kind)), usual)
