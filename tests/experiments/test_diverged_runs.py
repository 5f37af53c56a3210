"""What a command says of a run that has diverged: exit code 1, and the round in place of an accuracy."""

import json
from pathlib import Path

import pytest
import yaml

from fedbn_flwr.experiments import main
from tests.helpers.runs import OPTIONS, run, run_in

#: trains for two rounds; then every model is infinite at once
METHOD = "fedavg:lr-schedule==1e30@2"
SAID = "training diverged at round 3: no node has had a usable reply since"
CALM = {"model": "mlp", "rounds": "20", "evaluate_every": "20", "workers": "1"}


def test_a_run_ends_at_once_with_one_line_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--method", METHOD, results_dir=str(tmp_path), **CALM) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedbn-flwr: {SAID} (node 1000: ")
    assert line.endswith("the learning rate is 1e+30: try a lower learning rate")
    summary = json.loads((run_in(tmp_path) / "summary.json").read_text())
    assert (summary["diverged"], summary["rounds-done"]) == (3, 4)
    assert summary["failed"].startswith(SAID)


def test_in_a_comparison_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("compare", "--methods", f"fedavg,{METHOD},fedavg+gn", "--seeds", "2", results_dir=str(tmp_path), **CALM)
    assert code == 1
    output = capsys.readouterr()
    rows = [line for line in output.out.splitlines() if "training" not in line]
    assert sum("diverged at round 3" in row for row in rows) == 1
    assert sum(row.count("±") for row in rows) >= 2
    assert {"fedavg", "fedavg+gn"} <= {row.split()[0] for row in rows if row.split()}
    assert f"fedbn-flwr: 1 of 3 methods failed: {METHOD}" in output.err
    runs = json.loads((tmp_path / "study.json").read_text())["runs"]
    records = [json.loads((tmp_path / run["folder"] / "summary.json").read_text()) for run in runs]
    assert [record.get("diverged") for record in records] == [None, None, 3, 3, None, None]
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    assert "diverged at round 3" in (tmp_path / "page" / "report.html").read_text()


def test_a_matrix_says_so_in_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**OPTIONS, "model": "mlp", "rounds": 8}
    content = {"about": "a", "methods": {"good": "fedavg", "bad": METHOD}, "options": options}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    assert main(["reproduce", str(tmp_path / "mine.yaml"), "--results-dir", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert "bad, seed 0: diverged at round 3" in table
    assert [
        " ".join(line.split()) for line in table.splitlines() if "diverged at round 3" in line and ":" not in line
    ] == ["bad diverged at round 3"]
    assert f"Failed: bad: {SAID}" in table
