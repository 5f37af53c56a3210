"""A Flower project's nodes in worker processes, in place of Flower's simulation."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

import fedbn_flwr
from fedbn_flwr.device import count_cores
from fedbn_flwr.server.grids import wait_for_all
from fedbn_flwr.simulation import WorkersGrid, in_workers
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedTAN, FixBN
from tests.helpers.checkout import ROOT
from tests.helpers.flower_simulation import InMemoryGrid
from tests.helpers.processes import is_alive
from tests.helpers.waiting import wait_until

NODES = 3
HERE = Path(fedbn_flwr.__file__).parent
#: a project as its user writes it, whose loop draws by node and round, and loads data in processes
#: of its own
TASK = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = []

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

def train(message, context):
    node, config = context.node_config["partition-id"], message.content["config"]
    torch.manual_seed(100 * config["server-round"] + node)
    STEPS.append(node)
    inputs, targets = torch.randn(24, 4) + node, torch.arange(24) % 3
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = list(DataLoader(TensorDataset(inputs, targets), 12, num_workers=context.run_config["loaders"]))
    torch.manual_seed(100 * config["server-round"] + node)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    metrics = {"num-examples": 24, "loops": STEPS.count(node), "nodes": context.node_config["num-partitions"]}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
"""
APPS = {
    "plain_app": "from flwr.clientapp import ClientApp\nfrom own_task import train\napp = "
    "ClientApp()\n",
    "own_app": "from fedbn_flwr.clientapp import ClientApp\nfrom own_task import make_model, "
    "train\n"
    "app = ClientApp(model=make_model)\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a project, from which its modules are imported."""
    (tmp_path / "own_task.py").write_text(TASK)
    for name, text in APPS.items():
        (tmp_path / f"{name}.py").write_text(f"{text}app.train()(train)\nnumber = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("own_task", *APPS):
        sys.modules.pop(name, None)


def context(**run_config: Any) -> Context:
    return Context(1, 0, {}, RecordDict(), {"loaders": 0, **run_config})


def simulated(app: str, **run_config: Any) -> InMemoryGrid:
    return InMemoryGrid(__import__(app).app, NODES, context(**run_config).run_config)


def trained(strategy: Any, grid: Any) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    model = __import__("own_task").make_model()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=2,
    )
    return result.arrays.to_torch_state_dict(), {
        number: dict(metrics) for number, metrics in result.train_metrics_clientapp.items()
    }


@pytest.mark.parametrize(
    ("app", "strategy", "loaders", "workers"),
    [
        (
            "plain_app",
            lambda: FlowersFedAvg(fraction_evaluate=0.0, min_available_nodes=NODES),
            2,
            2,
        ),
        ("own_app", lambda: FixBN(freeze_round=1, fraction_evaluate=0.0), 0, 0),
        ("own_app", lambda: FedTAN(fraction_evaluate=0.0), 0, 2),
    ],
)
@pytest.mark.sampled(1)
def test_any_projects_nodes_train_as_in_flowers_simulation(
    app: str, strategy: Any, loaders: int, workers: int
) -> None:
    reference = simulated(app)
    wait_for_all(reference, pause=0)
    model, _ = trained(strategy(), reference)
    given = simulated(app, loaders=loaders)
    grid = in_workers(given, context(loaders=loaders), f"{app}:app", workers)
    assert isinstance(grid, WorkersGrid)
    with grid:
        assert len(grid.process_ids) == (workers or min(count_cores(), NODES))
        assert os.getpid() not in grid.process_ids
        there, metrics = trained(strategy(), grid)
    # Flower's strategy adds replies up in the order of its draw
    rounding = 1e-6 if app == "plain_app" else 0
    torch.testing.assert_close(there, model, rtol=rounding, atol=rounding)
    assert [row["nodes"] for row in metrics.values()] == [NODES] * 2
    # once a round, also in a step that waits at every BN layer
    assert [row["loops"] for row in metrics.values()] == [1, 2]
    # what was given goes on
    torch.testing.assert_close(trained(strategy(), given)[0], model, rtol=rounding, atol=rounding)


def test_messages_stay_those_of_flowers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pytest.importorskip(
        "flwr.supercore.task_identity"
    ).TaskIdentity  # before Flower 1.38 there is none
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(identity, name, 7)
    grid = simulated("plain_app")
    assert (identity.run_id, identity.node_id, identity.task_id) == (7, 7, 7)
    message = Message(
        RecordDict(), dst_node_id=next(iter(grid.get_node_ids())), message_type="train"
    )
    assert message.metadata.run_id == 7


def test_a_deployments_grid_stays() -> None:
    grid = InProcessGrid(__import__("plain_app").app, NODES)
    assert in_workers(grid, context(), "plain_app:app") is grid


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain_app", "unknown ClientApp 'plain_app'; give package.module:function"),
        ("no_app:app", "cannot import 'no_app'"),
        ("plain_app:apq", "has no function 'apq'"),
        ("own_task:train", "'own_task:train' is not a ClientApp"),
    ],
)
@pytest.mark.sampled(1)
def test_an_app_that_is_not_there_is_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        in_workers(simulated("plain_app"), context(), name)


def test_a_worker_that_dies_is_named_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with in_workers(simulated("own_app"), context(), "own_app:app", 2) as grid:  # type: ignore[attr-defined]
        trained(FixBN(freeze_round=1, fraction_evaluate=0.0), grid)
        os.kill(grid.process_ids[1], signal.SIGKILL)
        wait_until(lambda: not is_alive(grid.process_ids[1]))
        _, metrics = trained(FixBN(freeze_round=1, fraction_evaluate=0.0, min_train_nodes=2), grid)
    assert (
        "Worker 1 was killed by signal 9: it is started again, its 1 nodes without state"
        in caplog.text
    )
    assert len(metrics) == 2


@pytest.mark.slow
def test_workers_import_what_the_server_imports(project: Path) -> None:
    """Another version of a module lies where a new Python looks first: in the current folder, and
    in PYTHONPATH.
    """
    elsewhere = project / "elsewhere"
    for folder, version in ((elsewhere, "other"), (project / "bundle", "bundle")):
        (folder / "fedbn_flwr").mkdir(parents=True)
        source = (HERE / "__init__.py").read_text()
        (folder / "fedbn_flwr" / "__init__.py").write_text(
            f"__path__.append({str(HERE)!r})\n{source}\nVERSION_HERE = {version!r}\n"
        )
    script = f"""
import sys
sys.path[:0] = [{str(project / "bundle")!r}, {str(project)!r}]
import fedbn_flwr, plain_app
assert fedbn_flwr.VERSION_HERE == "bundle"
from tests.simulation.processes.test_in_workers import told
print(told())
"""
    env = {**os.environ, "PYTHONPATH": f"{elsewhere}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=elsewhere, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "bundle"


def told() -> str:
    """Return which version of the package a worker has."""
    (Path(sys.path[1]) / "version_app.py").write_text(VERSION_APP)
    with in_workers(simulated("version_app"), context(), "version_app:app", 1) as grid:  # type: ignore[attr-defined]
        assert len(grid.process_ids) == 1
        _, metrics = trained(FlowersFedAvg(fraction_evaluate=0.0, min_available_nodes=NODES), grid)
    return {1.0: "bundle", 0.0: "other"}[metrics[1]["version"]]


VERSION_APP = (
    APPS["plain_app"]
    + """
import fedbn_flwr

@app.train()
def tell(message, context):
    reply = train(message, context)
    reply.content["metrics"]["version"] = float(fedbn_flwr.VERSION_HERE == "bundle")
    return reply
"""
)
