"""The doctor finds in each app what was planted there, and nothing else."""

import json
import multiprocessing
import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from fedbn_flwr.doctor.app import FlowerApp, run_app
from fedbn_flwr.doctor.examine import Examination, examine
from fedbn_flwr.doctor.findings import Finding
from fedbn_flwr.doctor.observer import describe_network
from fedbn_flwr.experiments import main

APPS = Path(__file__).parent / "apps"
NAMES = sorted(
    path.stem
    for path in APPS.glob("*.py")
    if path.stem not in ("common", "of_flower", "lists_only")
)

#: whose network, or whose libraries, take long in each message's process
LARGE = ("kept_by_name", "lightning_module", "variants")

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _apps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APPS))
    monkeypatch.chdir(APPS)


@cache
def examined(name: str, **config: str | int) -> Examination:
    nodes = getattr(import_module(name), "NODES", 2)
    app = FlowerApp(APPS, f"{name}:server", f"{name}:client", {"num-server-rounds": 3, **config})
    return examine(run_app(app, nodes, 2, 300))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in NAMES],
)
@pytest.mark.sampled(6)
def test_what_is_planted_is_found_and_nothing_else(name: str) -> None:
    planted = import_module(name)
    examination = examined(name)
    found = {finding.name for finding in examination.findings}
    assert found == planted.EXPECTED, "\n".join(map(str, examination.findings))
    failing = {"does-not-load", "one-value", "names-differ"}
    assert not examination.stopped or found & failing


@pytest.mark.slow
def test_layers_are_named_and_counted() -> None:
    (finding,) = (each for each in examined("kept_by_name").findings if each.name == "partly-local")
    assert finding.layers == (
        "layer2.0.downsample.1",
        "layer3.0.downsample.1",
        "layer4.0.downsample.1",
    )
    assert "3 of 20 BN layers (layer2.0.downsample.1, ...)" in finding.saw
    assert "kept on the nodes: 17 of 20 BN layers (bn1, ...)" in finding.saw


def test_the_table_says_what_is_sent_averaged_and_comes_back() -> None:
    silo = examined("silo").layers
    assert [(layer.name, layer.sent, layer.came_back) for layer in silo] == [
        ("bn1", "weights", "kept"),
        ("norm", "weights", "kept"),
    ]
    assert {layer.came_back for layer in examined("set_back").layers} == {"set back"}
    adam = examined("server_adam").layers
    assert {(layer.sent, layer.came_back) for layer in adam} == {("all", "loaded")}
    assert {layer.averaged for layer in adam} <= {"below zero", "beyond"}


def test_layers_of_which_nobody_knows_how_many_there_are_are_counted_all_the_same() -> None:
    assert Finding("foreign", ("a", "b", "c")).saw.endswith(": a and 2 others")


FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.exists(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.parametrize("name", ["detector", "detector_copy"])
def test_a_detector_on_scenes_of_photographs(name: str) -> None:
    examination = examined(name, **{"fashion-mnist": str(FASHION)})
    assert {finding.name for finding in examination.findings} == import_module(name).EXPECTED


#: of networks that people use, how many layers of how many a rule of theirs keeps on the nodes
KEPT = [
    ("timm resnet50", "name", 49, 53),
    ("mobilenet_v2", "name", 0, 52),
    ("densenet121", "name", 0, 121),
    ("resnet18", "path", 1, 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "rule", "kept", "of"), KEPT)
def test_what_a_rule_by_names_keeps(network: str, rule: str, kept: int, of: int) -> None:
    examination = examined("kept_by_name", network=network, rule=rule, samples=32, size=32)
    assert sum(layer.came_back == "kept" for layer in examination.layers) == kept
    assert len(examination.layers) == of
    found = {finding.name for finding in examination.findings} - {"lag"}
    assert found == ({"partly-local", "counters"} if kept else {"averaged", "counters"})


@pytest.mark.parametrize(
    ("model", "names", "layers"),
    [("Net", {"averaged"}, ["bn1", "norm"]), ("Other", {"unnamed"}, ["2"])],
)
def test_lists_are_named_by_positions_in_the_model_that_is_given(
    model: str, names: set[str], layers: list[str]
) -> None:
    makes = {
        "Net": import_module("common").Net,
        "Other": import_module("one_value").make,
    }
    app = FlowerApp(APPS, "lists_only:server", "lists_only:client", {"num-server-rounds": 3})
    history = run_app(app, 2, 2, 300)
    examination = examine(history, describe_network(makes[model]()))
    assert {finding.name for finding in examination.findings} - {"no-repeat"} == names
    assert [layer.name for layer in examination.layers] == layers


#: what Flower's own strategies make of running statistics; docs/questions.md has this table
FLOWER = {
    "FedAvg": {"averaged", "counters"},
    "FedProx": {"averaged", "counters"},
    "FedAvgM": {"not-a-mean", "counters"},
    "FedAdagrad": {"not-a-mean", "counters"},
    "FedAdam": {"not-a-mean", "counters"},
    "FedYogi": {"not-a-mean", "counters"},
    "FedMedian": {"between", "counters"},
    "FedTrimmedAvg": {"between", "counters"},
    "Krum": {"one-node", "counters"},
    "DifferentialPrivacyServerSideFixedClipping": {"not-a-mean", "counters"},
}


#: which differ from others of the same outcome by their names
ALIKE = ("FedProx", "FedAvgM", "FedAdagrad", "FedYogi", "FedTrimmedAvg")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in FLOWER],
)
@pytest.mark.sampled(3)
def test_what_flowers_strategies_make_of_running_statistics(name: str) -> None:
    findings = examined("of_flower", strategy=name).findings
    # in how many rounds a variance is below zero depends on the draw
    found = {finding.name for finding in findings} - {"negative-variance"}
    assert found == FLOWER[name], "\n".join(map(str, findings))


# ---- the command ---------------------------------------------------------------------------------


def make_app(folder: Path, name: str, config: str = "num-server-rounds = 3") -> Path:
    """Make the folder of an app, as `flwr new` does."""
    for path in APPS.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "pyproject.toml").write_text(
        f'[tool.flwr.app.components]\nserverapp = "{name}:server"\nclientapp = "{name}:client"\n'
        f"[tool.flwr.app.config]\n{config}\n"
    )
    return folder


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["doctor", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_wrong_is_an_exit_code_of_one_and_worth_knowing_is_none(
    tmp_path: Path, doctor: Doctor
) -> None:
    code, out, _ = doctor(make_app(tmp_path, "momentum"), "--nodes", "2")
    assert code == 1
    assert out.index("wrong: ") < out.index("worth knowing: ") < out.index("fine: ")
    assert "Use a momentum above 0" in " ".join(out.split())
    assert "docs/doctor.md#never-move" in out
    code, out, _ = doctor(make_app(tmp_path, "message_api"), "--nodes", "2", "--json")
    assert code == 0
    printed = json.loads(out)
    assert {finding["name"] for finding in printed["findings"]} == {"averaged", "counters"}
    assert [layer["name"] for layer in printed["layers"]] == ["bn1", "norm"]
    assert Path.cwd() == APPS


def test_a_serverapp_that_stops_is_an_exit_code_of_one(tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "two_networks.py").write_text(
        "from common import *\n"
        "client, server = ClientApp(), plain_server()\n"
        "@client.train()\ndef fit(message, context):\n"
        "    net = Net()\n"
        "    if context.node_config['partition-id']:\n"
        "        net = nn.Sequential(net)\n"
        "    train(net, loader := load_data(context))\n"
        "    return reply(message, loader, arrays=ArrayRecord(net.state_dict()))\n"
    )
    code, out, _ = doctor(make_app(tmp_path, "two_networks"), "--nodes", "2", "--json")
    printed = json.loads(out)
    assert code == 1
    assert "must have the same keys" in printed["stopped"]
    assert not printed["findings"]
    assert {layer["sent"] for layer in printed["layers"]} == {"by some"}


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("many_nodes", [], "it waits for 7 nodes: pass --nodes 7"),
        ("old_many_nodes", [], "it waits for 5 nodes: pass --nodes 5"),
        ("no_data", [], "FileNotFoundError: there is no /data/scans"),
        ("no_data", ["--run-config", "colour=1"], "the app has no 'colour'; it has num-server"),
        ("no_data", ["--run-config", "a=b c"], "must be KEY=VALUE"),
        ("no_data", ["--run-config", "other.toml"], "there is no other.toml"),
        ("no_data", ["--nodes", "none"], "--nodes must be a whole number"),
        ("no_data", ["--model", "common:load_data"], "--model"),
        ("no_data", ["--model", "common"], "unknown model 'common'; give package.module:function"),
        ("exits", [], "the ServerApp stopped: SystemExit: no licence"),
        ("common", [], "'common:server' in the app's pyproject.toml is no ServerApp"),
        ("no_network", [], "no node trained a network of PyTorch"),
    ],
)
@pytest.mark.sampled(5)
def test_one_line_says_what_to_pass(
    tmp_path: Path,
    doctor: Doctor,
    name: str,
    arguments: list[str],
    line: str,
) -> None:
    (tmp_path / "many_nodes.py").write_text(
        "from common import *\nclient = plain_client()\n"
        "server = plain_server(strategy=lambda: FedAvg(min_available_nodes=7))\n"
    )
    (tmp_path / "exits.py").write_text("raise SystemExit('no licence')\n")
    (tmp_path / "old_many_nodes.py").write_text(
        "from numpy_client import *\n"
        "def server_fn(context):\n"
        "    strategy = FedAvg(min_available_clients=5)\n"
        "    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=1))\n"
        "server = ServerApp(server_fn=server_fn)\n"
    )
    (tmp_path / "no_data.py").write_text(
        "from common import *\ndef data(context):\n"
        "    raise FileNotFoundError('there is no /data/scans')\n"
        "client = plain_client(data=data)\nserver = plain_server()\n"
    )
    (tmp_path / "no_network.py").write_text(
        "from common import *\nserver = plain_server()\nclient = ClientApp()\n"
        "@client.train()\n@client.evaluate()\ndef answer(message, context):\n"
        "    return reply(message, [0], arrays=message.content['arrays'])\n"
    )
    code, out, err = doctor(make_app(tmp_path, name), *arguments)
    assert code == 2
    assert not out
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff", "is none of a Flower app: UnicodeDecodeError: "),
        (b"[tool", "is none of a Flower app: TOMLDecodeError: "),
        (b"[tool.flwr]\napp = 3", "is none of a Flower app: TypeError: "),
        (b"[tool.flwr]", "has no 'app' of [tool.flwr.app.components]"),
        (
            b'[tool.flwr.app]\nconfig = 3\ncomponents = {serverapp = "a:b", clientapp = "a:c"}',
            "is none of a Flower app: AttributeError: ",
        ),
    ],
)
def test_a_file_that_is_none_of_an_app(
    content: bytes, reason: str, tmp_path: Path, doctor: Doctor
) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    code, _, err = doctor(tmp_path)
    assert code == 2
    assert err.startswith(f"fedbn-flwr: {tmp_path / 'pyproject.toml'} {reason}")
    assert err.count("\n") == 1
    make_app(tmp_path, "common")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    code, _, err = doctor(tmp_path, "--run-config", tmp_path / "bytes.toml")
    assert code == 2
    assert err.startswith("fedbn-flwr: --run-config must be KEY=VALUE")


def test_a_folder_that_is_no_app_and_a_run_that_takes_too_long(
    tmp_path: Path, doctor: Doctor
) -> None:
    code, _, err = doctor(tmp_path)
    assert code == 2
    assert "name the folder of a Flower app" in err
    (tmp_path / "slow.py").write_text(
        "import time\nfrom common import *\nserver = plain_server()\n"
        "client = plain_client(fit=lambda net, loader: time.sleep(600))\n"
    )
    app = FlowerApp.read(make_app(tmp_path, "slow"))
    before = multiprocessing.active_children()
    history = run_app(app, 2, 2, 8)
    assert "pass --minutes" in history.stopped
    assert {*multiprocessing.active_children()} <= {*before}
