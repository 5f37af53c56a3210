"""Write projects.md from apps/examples: what changes in each project."""

from difflib import unified_diff
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "apps" / "examples"
PAGE = Path(__file__).with_name("projects.md")

INTRODUCTION = """\
# Six projects, before and after

This page is written from `apps/examples` by `make docs`. Each project runs there as it was `before`, and `after`, with
`flwr run`. The module `task.py`, with model, data and training loop, is the same in both and not shown. `FixBN` stands
for any strategy: [plugin.md](plugin.md) has the table of methods and projects.

In all of them `pyproject.toml` gets one line, the dependency `"fedbn-flwr>=0.1"`.
"""

PROJECTS = {
    "quickstart": "Flower's quickstart: the message API, and a training loop in plain PyTorch.",
    "advanced": (
        "A strategy of the project's own, a global evaluation that keeps the best model, and a classification head "
        "that stays on each node in its `context.state`. The strategy goes on as a subclass of another base."
    ),
    "lightning": "A LightningModule, trained by Lightning's `Trainer`, whose optimizer calls the loss as a closure.",
    "huggingface": (
        "A ResNet of Hugging Face's `transformers`. Its outputs are an object with `loss` and `logits`; the loop stays "
        "as it is, since nothing of this project calls the model."
    ),
    "numpy-client": (
        "FedBN by the names of layers, as in Flower's baseline: a `NumPyClient` and Flower's older server. Names and "
        "files of BN go, because the strategy finds BN by type and the node's state keeps it. Lists of arrays stay."
    ),
    "client-library": (
        "Clients that inherit from a library, which makes model, data and optimizer in hooks and leaves layers out of "
        "the exchange by type, as FL4Health's do. The library is not touched: the client stops leaving layers out."
    ),
}


def page() -> str:
    """Return the text of projects.md."""
    return "\n\n".join([INTRODUCTION.strip(), *map(section, PROJECTS)]) + "\n"


def section(project: str) -> str:
    """Return what changes in a project."""
    parts = [f"## {project}", PROJECTS[project]]
    for name in ("client_app.py", "server_app.py"):
        before, after = ((EXAMPLES / project / kind / name).read_text().splitlines() for kind in ("before", "after"))
        changes = list(unified_diff(before, after, lineterm="", n=1))[2:]
        parts += [f"`{name}`:", "\n".join(["```diff", *changes, "```"])]
    return "\n\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
