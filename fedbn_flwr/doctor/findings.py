"""What may become of BN, in words: what was seen, what follows, and the change that fixes it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Level = Literal["wrong", "worth knowing", "fine"]
PAGE = "docs/doctor.md"


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding; `{layers}` and `{detail}` in what was seen are the finding's."""

    level: Level
    saw: str
    follows: str = ""
    fix: str = ""


#: worst first
KINDS = {
    # ---- wrong: what comes back from the server
    "not-finite": FindingKind(
        "wrong",
        "the averaged BN of {layers} has numbers that are not finite",
        "Every node is at chance from here on.",
        "Look at each node's loss first: one diverged, or sent statistics in half precision.",
    ),
    "negative-variance": FindingKind(
        "wrong",
        "the averaged running_var of {layers} is below zero{detail}",
        "In evaluation mode the model returns NaN.",
        "A server optimizer, or noise, goes past the nodes' values: let it change parameters only, "
        "and average running statistics as FedAvg does (server-optimizer=adam here does both).",
    ),
    "not-a-mean": FindingKind(
        "wrong",
        "the running statistics of {layers} come back outside of all nodes' values",
        "They are the statistics of no data: a server optimizer, a clip or noise has changed them.",
        "Change parameters only, and average running statistics as FedAvg does.",
    ),
    "shortened": FindingKind(
        "wrong",
        "the running statistics of {layers} move only part of the way to the nodes' mean{detail}",
        "They lag behind the weights that they belong to.",
        "Clip or scale the update of parameters only; running statistics are averaged as they are.",
    ),
    "one-node": FindingKind(
        "wrong",
        "the running statistics of {layers} come back as one node sent them",
        "The global model has the statistics of that node's data.",
        "Average every entry of state_dict(), not model.parameters().",
    ),
    "not-averaged": FindingKind(
        "wrong",
        "the nodes send running statistics of {layers}, and the old ones come back",
        "The global model is evaluated with statistics of nobody's data.",
        "Average every entry of state_dict(), not model.parameters().",
    ),
    "names-differ": FindingKind(
        "wrong",
        "nodes send the entries of {layers} at different places{detail}",
        "Entries of different layers are averaged with each other.",
        "Send state_dict() by name, in ArrayRecord(model.state_dict()).",
    ),
    # ---- wrong: what is sent
    "statistics-not-sent": FindingKind(
        "wrong",
        "the nodes send the weights of {layers}, but no running statistics, and keep none",
        "A model made of what is sent is evaluated with means of 0 and variances of 1.",
        "Send ArrayRecord(model.state_dict()) in place of model.parameters().",
    ),
    "partly-local": FindingKind(
        "wrong",
        "BN of {layers} is shared, and that of other layers is kept on the nodes{detail}",
        "A name such as `bn` does not find every BN layer.",
        "Find layers by type: isinstance(module, torch.nn.modules.batchnorm._BatchNorm); FedBN of "
        "this package does.",
    ),
    "local-lost": FindingKind(
        "wrong",
        "BN of {layers} is not loaded from what a node receives, and is gone in its next message",
        "Each message begins with the statistics and weights of a model that is made anew.",
        "Keep them in context.state, as an ArrayRecord, and load them in every message.",
    ),
    "copy-without-statistics": FindingKind(
        "wrong",
        "what is sent of {layers} has trained weights and the old running statistics",
        "A copy of the model, such as an average of its weights, does not follow its buffers.",
        "Copy the model's buffers into it, as torch.optim.swa_utils.AveragedModel does.",
    ),
    # ---- wrong: in a node's process
    "measured-in-training": FindingKind(
        "wrong",
        "evaluation goes through {layers} in training mode{detail}",
        "Each score depends on the mini-batch, and evaluation changes the statistics.",
        "Call model.eval() before evaluation.",
    ),
    "evaluated-without": FindingKind(
        "wrong",
        "evaluation goes through {layers} with means of 0 and variances of 1{detail}",
        "The score is that of no trained model.",
        "Load running statistics before evaluation: send them, or keep them in context.state.",
    ),
    "eval-mode-untrained": FindingKind(
        "wrong",
        "training goes through {layers} in evaluation mode, with means of 0 and variances of 1",
        "BN normalizes nothing.",
        "Call model.train() before training.",
    ),
    "never-move": FindingKind(
        "wrong",
        "the running statistics of {layers} do not move in training{detail}",
        "Training normalizes with a mini-batch's statistics, and evaluation with others.",
        "Use a momentum above 0, such as the default .1, and send the statistics that training "
        "leaves.",
    ),
    "frozen-moves": FindingKind(
        "wrong",
        "the weights of {layers} are frozen, and the running statistics move",
        "The frozen part of the network is another one after each round.",
        "Put frozen BN layers into evaluation mode after each model.train().",
    ),
    "one-value": FindingKind(
        "wrong",
        "training failed at a mini-batch of one sample{detail}",
        "The node's round is lost.",
        "DataLoader(..., drop_last=True), or mini-batches that leave no single sample.",
    ),
    "does-not-load": FindingKind(
        "wrong",
        "a node could not load what it was sent{detail}",
        "The node's round is lost. strict=False would only hide it: what is missing begins anew.",
        "Add the node's own BN entries to those received, then load with strict=True.",
    ),
    "node-failed": FindingKind(
        "wrong", "a node failed{detail}", "Its round is lost.", "The traceback is the app's own."
    ),
    # ---- worth knowing
    "between": FindingKind(
        "worth knowing",
        "the running statistics of {layers} come back between the nodes' values, and as no mean",
        "A median, a trimmed mean or Krum does so; their mixture's variance does not.",
    ),
    "counters": FindingKind(
        "worth knowing",
        "num_batches_tracked of {layers} comes back as another type or shape{detail}",
        "load_state_dict rounds it into the model: harmless, unless momentum is None or a check "
        "compares types.",
    ),
    "apart": FindingKind(
        "worth knowing",
        "the nodes' statistics lie apart, most in {layers}{detail}",
        "The averaged variance leaves out the spread of the nodes' means, and no node has trained "
        "with what is evaluated.",
        "Measure it with `fedbn-flwr diagnose`; FixBN, FedTAN or statistics=exact fix it.",
    ),
    "statistics-local": FindingKind(
        "worth knowing",
        "the nodes share the weights of {layers}, and keep their own running statistics",
        "That is SiloBN: there is no global model to evaluate, only personal ones.",
    ),
    "lag": FindingKind(
        "worth knowing",
        "few steps a round: {detail} of the running statistics of {layers} is what came",
        "They lag behind the weights.",
        "Train more steps a round, raise momentum, or measure them in a pass of their own "
        "(statistics=exact).",
    ),
    "cumulative": FindingKind(
        "worth knowing",
        "momentum=None in {layers}, with counters that are shared",
        "A new mini-batch has the weight of one among all of all rounds: statistics stand still.",
        "Set num_batches_tracked to 0 at the start of a round, or use a momentum.",
    ),
    "half": FindingKind(
        "worth knowing",
        "running statistics of {layers} are sent in half precision{detail}",
        "A variance above 65,504 is infinite in float16, and a small one is 0.",
        "Send running statistics in float32.",
    ),
    "eval-mode": FindingKind(
        "worth knowing",
        "training goes through {layers} in evaluation mode, with earlier running statistics",
        "BN is a fixed scaling then, as FixBN's second stage or a frozen network has it.",
    ),
    "eval-mode-later": FindingKind(
        "worth knowing",
        "gradients come through {layers} in training mode, and in evaluation mode too",
        "Steps in evaluation mode move the weights, and the running statistics stand still.",
        "Unless BN is frozen on purpose, call model.train() again after each evaluation.",
    ),
    "one-sample": FindingKind(
        "worth knowing",
        "a mini-batch of one sample in {layers}{detail}",
        "Its variance is that inside a single sample; without a spatial extent training fails.",
        "DataLoader(..., drop_last=True).",
    ),
    "without-statistics": FindingKind(
        "worth knowing",
        "no running statistics in {layers}",
        "Evaluation normalizes with its own mini-batches: scores depend on their size and order.",
        "Use track_running_stats=True.",
    ),
    "clipped-by-statistics": FindingKind(
        "worth knowing",
        "the update is clipped, and running statistics are {detail} of its squared norm",
        "The parameters are shortened because of statistics.",
        "Leave running statistics out of the norm and out of the clip.",
    ),
    "no-repeat": FindingKind(
        "worth knowing",
        "no node took part twice: what nodes keep could not be seen",
        "",
        "Pass more --rounds.",
    ),
    "foreign": FindingKind(
        "worth knowing",
        "running statistics in layers that are no BN of torch's: {layers}",
        "What finds BN by its type takes it for weights: FedBN shares it, and nothing else here is "
        "about it.",
        "Derive its class from torch.nn.modules.batchnorm._BatchNorm; of a scripted, traced or "
        "exported model, use the one that it was made of.",
    ),
    "unnamed": FindingKind(
        "worth knowing",
        "none of the {detail} arrays that a node sends is an entry of the network, by its name, "
        "numbers or position",
        "What becomes of them could not be seen.",
        "Pass --model MODULE:NAME, the function or class that makes the network.",
    ),
    # ---- fine
    "averaged": FindingKind("fine", "BN of {layers} is sent, averaged and comes back"),
    "local": FindingKind(
        "fine", "BN of {layers} stays on its node, and is there in the next message"
    ),
    "variants": FindingKind("fine", "BN of a class of its own: {detail}"),
    "others": FindingKind("fine", "other normalizers: {detail}"),
    "no-bn": FindingKind("fine", "the network has no BN layer: FedBN equals FedAvg here"),
}


@dataclass(frozen=True)
class Finding:
    """Something that was seen of some layers."""

    name: str
    layers: tuple[str, ...] = ()
    detail: str = ""
    #: of the network: all of them are called so
    of: int = 0

    @property
    def level(self) -> Level:
        """How bad it is."""
        return KINDS[self.name].level

    @property
    def saw(self) -> str:
        """What was seen."""
        return KINDS[self.name].saw.format(layers=self.named(), detail=self.detail)

    def __str__(self) -> str:
        kind = KINDS[self.name]
        return " ".join(filter(None, (f"{self.saw}.", kind.follows, kind.fix)))

    def named(self) -> str:
        """Name the layers: all, or how many and the first."""
        count = len(self.layers)
        if count == self.of and count > 1:
            return f"all {count} BN layers"
        if count > 2 and not self.of:
            return f"{self.layers[0]} and {count - 1} others"
        if count > 2:
            return f"{count} of {self.of} BN layers ({self.layers[0]}, ...)"
        return ", ".join(self.layers) or "a layer"

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        kind = KINDS[self.name]
        return {
            **asdict(self),
            "level": kind.level,
            "saw": self.saw,
            "follows": kind.follows,
            "fix": kind.fix,
        }


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once, with the layers of all, in the order of the catalogue."""
    once: dict[str, Finding] = {}
    for finding in findings:
        first = once.setdefault(finding.name, finding)
        layers = tuple(dict.fromkeys(first.layers + finding.layers))
        once[finding.name] = replace(first, layers=layers)
    return [once[name] for name in KINDS if name in once]
