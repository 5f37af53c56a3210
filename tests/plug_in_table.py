"""Write the table of docs/plugin.md: which methods run in which projects of apps/examples, and what that takes.

python -m tests.plug_in_table

Every cell takes the project `after` with its strategy replaced by another method, counts the lines in which that
differs from the project `before`, and runs it in this process, in float64. What its nodes send and keep must be what
`BNClient`s send and keep.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from difflib import ndiff
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import state
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.batch_plan import BatchLoader
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.clientapp.mods import ClientAppCallable
from fedbn_flwr.data import Split
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction
from tests.helpers.checkout import ROOT

EXAMPLES, PAGE = ROOT / "apps" / "examples", ROOT / "docs" / "plugin.md"
BEGIN, END = "<!-- table of projects and methods -->\n", "<!-- end of the table -->\n"
NODES, ROUNDS = 3, 3
#: so large that every step is on all of a node's data
WHOLE = 10_000

PROJECTS = {
    "quickstart": "Flower's quickstart: messages, a loop of its own",
    "advanced": "a strategy of its own, global evaluation, a local head",
    "lightning": "a LightningModule",
    "numpy-client": "FedBN by names, `NumPyClient`, the older server",
}


@dataclass(frozen=True)
class Method:
    """A strategy in place of the projects' `FixBN(freeze_round=0.5, ...)`."""

    cls: str
    options: str = ""
    #: of the ClientApp
    app_options: str = ""
    prepared: bool = False
    #: steps a round: an epoch is one step
    epochs: int = 2


METHODS = {
    "fixbn": Method("FixBN", "freeze_round=1, "),
    "fedbn": Method("FedBN"),
    "silobn": Method("SiloBN"),
    "fedprox": Method("FedProx", "mu=0.5, "),
    "fedwon": Method("FedWon", prepared=True),
    # Lightning reports the loss of the last epoch only, by which the nodes weigh
    "fedbs": Method("FedBS", 'loss="running", ', app_options=', loss_key="train_loss"', epochs=1),
    "scaffold": Method("Scaffold"),
    "fedtan": Method("FedTAN"),
}


# ---- a project with a method -----------------------------------------------------------------------------------------


def sources(project: str, kind: str) -> dict[str, str]:
    """Return the modules of a project; the folder `before` has those that `after` has in another form."""
    paths = {path.name: path for name in ("after", kind) for path in (EXAMPLES / project / name).glob("*.py")}
    return {name: path.read_text() for name, path in sorted(paths.items())}


def with_method(project: str, method: Method) -> dict[str, str]:
    """Return the modules of the project `after`, with another method in FixBN's place."""
    files = sources(project, "after")
    server = files["server_app.py"].replace("freeze_round=0.5, ", method.options)
    files["server_app.py"] = re.sub(r"\bFixBN\b", method.cls, server)
    structure = r"(model=|client_fn, )Net\)"
    assert re.search(structure, files["client_app.py"])
    files["client_app.py"] = re.sub(structure, rf"\1Net{method.app_options})", files["client_app.py"])
    if method.prepared:
        for name in ("client_app.py", "server_app.py"):
            files[name] = prepared(files[name], method.cls)
    return files


def prepared(text: str, cls: str) -> str:
    """Return a module in which every model is prepared for a method."""
    text = re.sub(r"\bNet\((.*)\)$", rf"prepare(Net(\1), {cls})", text, flags=re.MULTILINE)
    text = text.replace("Net().state_dict()", f"prepare(Net(), {cls}).state_dict()")
    text = re.sub(r"(model=|client_fn, )Net\b", rf"\1lambda: prepare(Net(), {cls})", text)
    names = "import FedWon" if f"strategies import {cls}" in text else ""
    if names:
        return text.replace(f"strategies import {cls}", f"strategies import {cls}, prepare")
    return text.replace("from task import", f"from fedbn_flwr.strategies import {cls}, prepare\nfrom task import", 1)


def changed_lines(project: str, files: dict[str, str]) -> tuple[int, int]:
    """Return how many lines of the project `before` are gone, and how many are new."""
    old = sources(project, "before")
    lines = [line for name in files for line in ndiff(old[name].splitlines(), files[name].splitlines())]
    return sum(line.startswith("+ ") for line in lines), sum(line.startswith("- ") for line in lines)


@contextmanager
def imported(files: dict[str, str]) -> Iterator[dict[str, ModuleType]]:
    """Import modules from a folder of their own, which is the current one meanwhile."""
    with TemporaryDirectory() as folder, chdir(folder):
        for name, text in files.items():
            Path(folder, name).write_text(text)
        names = [name.removesuffix(".py") for name in files]
        sys.path.insert(0, folder)
        try:
            yield {name: __import__(name) for name in names}
        finally:
            sys.path.remove(folder)
            for name in names:
                sys.modules.pop(name, None)


# ---- what must hold --------------------------------------------------------------------------------------------------


class Recorder(InProcessGrid):
    """Keeps the arrays of every reply in training."""

    def __init__(self, app: ClientApp, options: Any) -> None:
        super().__init__(app, NODES, options)
        self.replied: list[dict[str, State]] = []

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        assert reply.has_content(), reply.error.reason
        if message.metadata.message_type.startswith("train"):
            self.replied.append(arrays_of(reply.content))
        return reply

    def kept(self) -> list[dict[str, State]]:
        """Return what the nodes keep for their strategy."""
        memories = (Memory(self.context(node).state) for node in self.get_node_ids())
        return [arrays_of(RecordDict(dict(memory.kept("")))) for memory in memories]


def arrays_of(content: RecordDict) -> dict[str, State]:
    return {name: state.from_record(record) for name, record in content.array_records.items()}


class WholeData(BNClient):
    """Takes each step on all data, as the projects do here."""

    def plan(self, instruction: Instruction) -> BatchLoader:
        return super().plan(replace(instruction, batch_size=WHOLE))


def bn_client_app(modules: dict[str, ModuleType], own_head: bool, epochs: int) -> ClientApp:
    """Return the app of `BNClient`s with a project's model, data and epochs, and if it has one its nodes' own head."""
    model = modules["client_app"].app.structure
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))

    def client(context: Context) -> BNClient:
        part = int(context.node_config["partition-id"])
        loaded = (loader.dataset.tensors for loader in modules["task"].load_data(part, NODES, WHOLE))
        train, test = (Split(inputs.float(), labels) for inputs, labels in loaded)
        return WholeData(model, train, test=test, partition_id=part, memory=context.state, device="cpu")

    def as_the_project(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config: Any = message.content["config"]
        config["local-epochs"] = epochs
        if own_head and "head" in context.state and "arrays" in message.content:
            message.content["arrays"] = ArrayRecord({**message.content["arrays"], **context.state["head"]})
        reply = call_next(message, context)
        if own_head and reply.has_content() and "arrays" in reply.content:
            trained = reply.content.array_records["arrays"].items()
            context.state["head"] = ArrayRecord({name: array for name, array in trained if name.startswith("fc.")})
        return reply

    return client_app(client, mods=[as_the_project])


def require_obedience(project: str, method: Method, files: dict[str, str]) -> None:
    """Run a project with its own loop and with `BNClient`s; the nodes must send and keep the same."""
    options: dict[str, Any] = {
        "num-server-rounds": ROUNDS,
        "local-epochs": method.epochs,
        "learning-rate": 0.05,
        "batch-size": WHOLE,
    }
    torch.set_default_dtype(torch.float64)
    try:
        with imported(files) as modules:
            own = modules["client_app"].app
            grids = []
            for app in (own, bn_client_app(modules, project == "advanced", method.epochs)):
                torch.manual_seed(0)
                grids.append(Recorder(app, options))
                modules["server_app"].app(grids[-1], Context(1, 0, {}, RecordDict(), options))
    finally:
        torch.set_default_dtype(torch.float32)
    found, wanted = grids
    assert wanted.replied
    torch.testing.assert_close(found.replied, wanted.replied, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.kept(), wanted.kept(), rtol=1e-10, atol=1e-12)


# ---- the table -------------------------------------------------------------------------------------------------------


def cell(project: str, name: str) -> str:
    """Run one project with one method; return the numbers of lines that changed."""
    files = with_method(project, METHODS[name])
    require_obedience(project, METHODS[name], files)
    added, removed = changed_lines(project, files)
    return f"+{added} −{removed}"


def row(project: str) -> str:
    """Return the row of a project."""
    return f"| {' | '.join([f'`{project}`', PROJECTS[project], *(cell(project, name) for name in METHODS)])} |"


def table() -> str:
    """Return the table."""
    head = ["project", "", *(f"`{name}`" for name in METHODS)]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *map(row, PROJECTS)]) + "\n"


def written(page: str, computed: str) -> str:
    """Return the page with the computed table."""
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:start] + "\n" + computed + "\n" + page[end:]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), table()))
