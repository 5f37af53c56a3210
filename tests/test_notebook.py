"""The notebook's cells run from the first to the last, and its stored outputs are those of its
cells.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkout import ROOT
from tests.helpers.registered import registries_restored

#: executed as plain Python: what a kernel adds is a picture of the last value, and needs packages
#: and ports
NOTEBOOK = ROOT / "docs" / "first-steps.ipynb"


def last_value(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    return (
        eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        if isinstance(last, ast.Expr)
        else None
    )


@pytest.mark.usefixtures("only_composed")
@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    kinds: list[list[str]] = []
    with registries_restored():
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                # enough to be above chance
                source = re.sub(r"rounds=\d+", "rounds=8", "".join(cell["source"]))
                value = last_value(source, names)
                # a kernel has a bar, which goes, in place of the lines about data and progress
                printed = re.sub(
                    r"^(round \d|\w+: [\d,]+ training ).*\n",
                    "",
                    capsys.readouterr().out,
                    flags=re.M,
                )
                shown = [
                    kind
                    for kind in ("_repr_html_", "_repr_png_")
                    if getattr(value, kind, lambda: None)()
                ]
                kinds.append([*(["stdout"] if printed else []), *shown])
                stored = [
                    output.get("name") or sorted(output["data"]) for output in cell["outputs"]
                ]
                assert bool(stored) == bool(kinds[-1]), "run the notebook, and store its outputs"
    assert kinds == [["_repr_html_"], ["_repr_png_"], ["stdout"], ["stdout"]]
    differences = names["results"].differences
    assert differences["fedavg+gn"].mean > 0.15
    assert names["accuracy"] == pytest.approx(names["mine"].summaries[2]["accuracy"])
    assert list(tmp_path.iterdir()) == []
