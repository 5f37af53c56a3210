"""Write wire.md from the code: the keys that strategies and clients exchange."""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from fedbn_flwr import client, wire
from fedbn_flwr.client.rules.registry import RULES
from fedbn_flwr.experiments import Config
from fedbn_flwr.wire import Instruction, wire_key
from fedbn_flwr.wire.history import CHECKPOINT, STATE_HISTORY
from fedbn_flwr.wire.instruction import on_wire

#: what options of the command say of the fields that bear their names
HELP = {item.name: item.metadata["help"] for item in fields(Config)}
PAGE = Path(__file__).with_name("wire.md")
SOURCE = Path(wire.__file__).with_name("instruction.py")

INTRODUCTION = """\
# Wire keys

This page is written from the code by `make docs`. It is for clients in another language, or without this package.

A strategy's message holds an ArrayRecord `arrays`, with the entries of the model's `state_dict` by name, each with its
own dtype, and a ConfigRecord `config`. `arrayrecord_key` and `configrecord_key` of a strategy change these two names.
How to train has plain names, which a user may write; what changes the method has names that begin with `fedbn.`. A key
at its default is not sent, unless the user wrote it. Flower's own `server-round` counts rounds from 1.

A reply holds `arrays`, without the entries that stay on the node; a MetricRecord `metrics` with `num-examples` and
whatever the client measured; and a ConfigRecord `report` with `obeyed`, the list of *binding* keys that the client
acted upon, without the prefix. A reply that does not list every binding key of its message ends the run: without
that, the method would silently be another one. Evaluation replies list theirs, too.
"""

#: where else names of this package are seen
ELSEWHERE = {
    wire.PARTITION_ID: "metric: the node's partition, which orders replies so that a run repeats its bits",
    wire.TRAIN_LOSS: "metric: the mean loss over the round's mini-batches; the weights of `fedbs:loss=running`",
    wire.LOCAL_LOSS: "metric: the loss on all local data, where it was asked for; the weights of `fedbs`",
    wire.EVAL_LOSS: "metric of an evaluation",
    wire.ACCURACY: "metric of an evaluation",
    wire.ACCURACY_PERSONAL: "metric of an evaluation: on data like the node's own",
    wire.DOMAIN_ACCURACY: "metric of an evaluation: a list, by domain",
    wire.DOMAIN: "metric: the domain of the node's samples, -1 for none; FedNorm averages within domains",
    wire.STATISTICS_CHANGE: "metric: how much BN's mini-batch statistics changed, for `fixbn:freeze-round=auto`",
    wire.LACKS_STATE: "in `report`: the node has lost the entries that stay on it, and asks for the whole model",
    wire.MOMENTUM: "ArrayRecord: the optimizer's state, with `momentum-state=global`",
    wire.CONTROL_VARIATES: "ArrayRecord: SCAFFOLD's c in a message, and the change of c_i in a reply",
    wire.MOMENTS: "ArrayRecord: count, mean and variance of every BN layer, of `train.gather`",
    wire.PERSONAL: "ArrayRecord: entries that the node keeps, in an evaluation that asks for them",
    wire.PARAMETERS: "in the `report` of `query.describe`: the names of the model's parameters",
    wire.BN_ENTRIES: "in the `report` of `query.describe`: the names of entries of BN layers",
    wire.NORMALIZERS: "in the `report` of `query.describe`: the classes of the model's BN layers",
    wire.NUM_ROUNDS: "key of a user's: how many rounds there will be, where a loop of one's own drives the strategy",
    wire.DESCRIBE: "message type: a node says who it is and what its model has",
    wire.GATHER: "message type: a node runs its data through the model and replies with `moments` (HBN, HeteroFL)",
    wire.LAYERWISE: "message type: one exchange of a layer-wise step (FedTAN, FedDNA)",
    STATE_HISTORY: "key: the runs whose kept states a resumed run goes on with",
    CHECKPOINT: "key: the round of the last checkpoint",
}


def page() -> str:
    """Return the text of wire.md."""
    keys = [
        (
            f"`{on_wire(wire_key(item.name))}`",
            f"`{item.default!r}`",
            "yes" if item.metadata.get("binding") else "",
            help_of(item.name),
        )
        for item in fields(Instruction)
        if item.name not in ("rule_keys", "server_round")
    ]
    rules = [
        (f"`{on_wire(key)}`", f"`{default_of(rule, key)!r}`", (rule.__doc__ or "").splitlines()[0])
        for key, rule in sorted(RULES.items())
        if on_wire(key) not in Instruction.wire_keys()
    ]
    others = [(f"`{name}`", meaning) for name, meaning in ELSEWHERE.items()]
    groups = ", ".join(f"`{group}`" for group in wire.GROUPS)
    return (
        "\n\n".join(
            [
                INTRODUCTION.strip(),
                "## Of an instruction",
                table(("key", "default", "binding", "meaning"), keys),
                f"The groups of entries are {groups}: BN's statistics with counters, its affine parameters, both, "
                "HBN's learned mix, and the whole model. BN is found by type.",
                "## Of clients' rules",
                "All of these are binding. A package of your own adds keys with `register_rule`.",
                table(("key", "off at", "rule"), rules),
                "## Metrics, records and message types",
                table(("name", "where, and what"), others),
            ]
        )
        + "\n"
    )


def help_of(name: str) -> str:
    """Return the comment above a field of `Instruction`, or what its name says."""
    found = re.search(rf"((?:    #: .*\n)+)    {name}: ", SOURCE.read_text())
    text = " ".join(line.strip().removeprefix("#: ") for line in found[1].splitlines()) if found else HELP[name]
    for constant in ("GROUPS", "MOMENTUM_STATES", "FREEZES", "LAYERWISE_MODES"):
        text = text.replace(constant, ", ".join(f"`{value}`" for value in getattr(wire, constant)))
    return text


def default_of(rule: type[client.Rule], key: str) -> object:
    """Return the value of a rule's key with which the rule is off."""
    (default,) = (item.default for item in fields(rule) if wire_key(item.name) == key)  # type: ignore[arg-type]
    return default


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)


def escaped(cell: str) -> str:
    """Return the text of a cell, in which nothing is the edge of a cell or a link."""
    return cell.replace("|", r"\|").replace("][", r"]\[")


if __name__ == "__main__":
    PAGE.write_text(page())
