"""Write wire.md from the code: the keys that strategies and clients exchange."""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from fedbn_flwr import client, wire
from fedbn_flwr.client.rules import RULES
from fedbn_flwr.experiments.config import shared_options
from fedbn_flwr.wire import Instruction, on_wire, wire_key
from fedbn_flwr.wire.history import CHECKPOINT, STATE_HISTORY

#: what options of the command say of the fields that bear their names
HELP = {name: option.help for name, option in shared_options().items()}
PAGE = Path(__file__).with_name("wire.md")
SOURCE = Path(wire.__file__).with_name("__init__.py")

INTRODUCTION = """\
# Wire keys

This page is for clients in another language, or without this package. It lists the keys of the messages between
strategies and clients. `make docs` writes it from the code.

**A message of a strategy** has two records. A strategy's `arrayrecord_key` and `configrecord_key` change their names:

- ArrayRecord `arrays`: the entries of the model's `state_dict` by name, each with its own dtype;
- ConfigRecord `config`: the keys below. Keys for training have plain names, and users may set them. Keys that change
  the method begin with `fedbn.`. A key with its default value is not sent, unless the user set it. Flower's own
  `server-round` counts rounds from 1.

**A reply of a client** has three records:

- ArrayRecord `arrays`: the entries of the model, without those that stay on the node;
- MetricRecord `metrics`: `num-examples`, and what the client measured;
- ConfigRecord `report`: `obeyed`, the list of *binding* keys that the client acted on, without the prefix.

**Packed arrays.** Flower sends each array by requests of its own. So messages of this package's server app also have a
ConfigRecord `packed`. A client may leave it out of its reply, and then always gets arrays by name. If a client puts
`version` (1) into a ConfigRecord `packed` of its reply, later messages to it are packed: a group has one array for each
dtype, named by it, such as `<f4`. Under the group's name, `packed` then holds JSON with a list `[name, dtype, shape]`
for each entry. The numbers of these entries are in the arrays, one after another.

A reply that does not list every binding key of its message is not used, and the log names the node. If no reply of a
round lists them, the run ends. Otherwise the method would silently be a different one. This also
holds for replies to evaluations.
"""

#: where else names of this package are seen
ELSEWHERE = {
    wire.PARTITION_ID: "metric: the node's partition; replies are sorted by it, so that a run can "
    "be repeated exactly",
    wire.TRAIN_LOSS: "metric: the mean loss over the round's mini-batches; `fedbs:loss=running` "
    "uses it as weight",
    wire.LOCAL_LOSS: "metric: the loss on all local data, if it was requested; `fedbs` uses it as "
    "weight",
    wire.RECEIVED_LOSS: "metric: the same of the received model, if it was requested; "
    "`fedbs:loss=received` uses it as weight",
    wire.EVAL_LOSS: "metric of an evaluation",
    wire.ACCURACY: "metric of an evaluation",
    wire.ACCURACY_PERSONAL: "metric of an evaluation: on data like the node's own",
    wire.DOMAIN_SCORES: "first part of a metric of an evaluation, such as `domain-accuracy`: the "
    "score by which methods are compared, a list by domain",
    wire.DOMAIN: "metric: the domain of the node's samples, -1 for none; FedNorm averages within "
    "domains",
    wire.STATISTICS_CHANGE: "metric: how much BN's mini-batch statistics changed, for "
    "`fixbn:freeze-round=auto`",
    wire.LACKS_STATE: "in `report`: the node has lost the entries that stay on it, and needs the "
    "whole model",
    wire.MOMENTUM: "ArrayRecord: the optimizer's state, with `momentum-state=global`",
    wire.CONTROL_VARIATES: "ArrayRecord: SCAFFOLD's c in a message, and the change of c_i in a "
    "reply",
    wire.MOMENTS: "ArrayRecord: count, mean and variance of every BN layer, in replies to "
    "`train.gather`",
    wire.STAYS: "ArrayRecord: entries that the node keeps, in an evaluation that requests them",
    wire.PARAMETERS: "in the `report` of `query.describe`: the names of the model's parameters",
    wire.BN_ENTRIES: "in the `report` of `query.describe`: the names of entries of BN layers",
    wire.TIED: "in the `report` of `query.describe`: further names of entries, each before the "
    "first name",
    wire.NUM_ROUNDS: "key: number of rounds; set it if your own loop drives the strategy",
    wire.DESCRIBE: "message type: a node describes itself and its model, with -1 for a "
    "`num-examples` not known yet",
    wire.GATHER: "message type: a node runs its data through the model and replies with `moments`",
    wire.LAYERWISE: "message type: one exchange of a layer-wise step (FedTAN, FedDNA)",
    STATE_HISTORY: "key: the runs whose saved states a resumed run continues with",
    CHECKPOINT: "key: the round of the last checkpoint",
}


def summary_of(thing: object) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split())


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
        (f"`{on_wire(key)}`", f"`{default_of(rule, key)!r}`", summary_of(rule))
        for key, rule in sorted(RULES.items())
        if on_wire(key) not in Instruction.wire_keys()
    ]
    others = [(f"`{name}`", meaning) for name, meaning in ELSEWHERE.items()]
    groups = ", ".join(f"`{group}`" for group in wire.GROUPS)
    return (
        "\n\n".join(
            [
                INTRODUCTION.strip(),
                "## Keys of a message",
                table(("key", "default", "binding", "meaning"), keys),
                f"The groups of entries are {groups}: nothing, BN's statistics with counters, "
                "BN's affine parameters, "
                "both, HBN's learned mix, and the whole model. BN is found by type.",
                "## Keys of rules",
                "A rule changes local training. All its keys are binding. Your own package can "
                "add rules with "
                "`register_rule`.",
                table(("key", "value if off", "rule"), rules),
                "## Metrics, records and message types",
                table(("name", "where, and meaning"), others),
            ]
        )
        + "\n"
    )


def help_of(name: str) -> str:
    """Return the comment above a field of `Instruction`, or what its name says."""
    found = re.search(rf"((?:    #: .*\n)+)    {name}: ", SOURCE.read_text())
    text = (
        " ".join(line.strip().removeprefix("#: ") for line in found[1].splitlines())
        if found
        else HELP[wire_key(name)]
    )
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
