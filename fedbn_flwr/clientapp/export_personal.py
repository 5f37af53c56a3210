"""Export a node's own model from what the node keeps."""

from flwr.app import ArrayRecord, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.clientapp.mods import KEPT
from fedbn_flwr.state import from_record


def export_personal(arrays: ArrayRecord, kept: RecordDict) -> ArrayRecord:
    """Return a node's own model: the server's entries, with those that the node keeps in their places.

    `arrays` is the server's model, for instance the final `result.arrays`. `kept` is the node's `context.state`, in
    which strategies such as `FedBN` and the mod `keep_local` keep entries. The result shares nothing with either.
    ValueError if the node keeps no entry of the model: its own model is then the server's, or it never trained.
    """
    memory = Memory(kept)
    personal = {**memory.recall(wire.PERSONAL), **memory.recall(KEPT)}
    if not personal:
        raise ValueError("the node keeps no entries of the model: it never trained, or the strategy shares all of them")
    model = from_record(arrays)
    if unknown := sorted(personal.keys() - model.keys()):
        raise ValueError(f"the node keeps {unknown[0]!r}, which is not an entry of the server's model")
    for name, value in personal.items():
        if value.shape != model[name].shape:
            raise ValueError(
                f"the node keeps {name!r} with shape {tuple(value.shape)}, the model has {tuple(model[name].shape)}"
            )
    return ArrayRecord({**model, **personal})
