"""Write projects.md from apps/examples: what changes in each project."""

import re
from pathlib import Path
from textwrap import fill

EXAMPLES = Path(__file__).parent.parent / "apps" / "examples"
PAGE = Path(__file__).with_name("projects.md")

INTRODUCTION = """\
# Four projects, before and after

There are four Flower projects in `apps/examples`, from which `make docs` writes this page. Each folder is complete, and
runs with `flwr run`. In a copy of the folder, `patch -R < changes.diff` makes the project as it was before. The module
`task.py`, with model, data and training loop, does not change. With another strategy than `FixBN`, all is the same.

In `quickstart` and `advanced`, two lines are only for [speed](plugin.md#a-faster-simulation).

Flower 1.42 installs the dependencies of an app for each run, and until there is a release no index has this package.
There are two ways:

- Install this package where the SuperLink runs, leave `pyproject.toml` as it is, and let Flower use what is installed:
  `export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1` before the first `flwr run`, which starts the SuperLink.
- Build a wheel (`uv build --wheel`), and add its path to the app's dependencies, such as
  `"fedbn-flwr @ file:///home/me/fedbn_flwr-0.1.0-py3-none-any.whl"`. With hatchling, `pyproject.toml` also needs
  `[tool.hatch.metadata]` with `allow-direct-references = true`.
"""

PROJECTS = {
    "quickstart": "Flower's quickstart: the message API, and a training loop in plain PyTorch.",
    "advanced": (
        "The project has its own strategy, which keeps the best model, and a classification head "
        "that stays on each node in its `context.state`. Only the base class of the strategy "
        "changes. Its `start` is a "
        "loop of its own, as in Flower's example: methods with one exchange a round run in it. "
        "Layer-wise ones need "
        "`self.ask(grid, messages, timeout)` in the place of `grid.send_and_receive`, and say so."
    ),
    "lightning": (
        "A network of timm, as ImageNet has left it, fine-tuned by Lightning's `Trainer`, whose "
        "optimizer calls the "
        "loss as a closure. In place of `FixBN`, [first "
        "try](choosing.md#a-network-that-was-already-trained) "
        "`FedAvg(freeze_bn=True)` for such a network, at a lower rate."
    ),
    "numpy-client": (
        "FedBN by the names of layers, as in Flower's baseline: a `NumPyClient` and Flower's "
        "older server. Names of "
        "BN layers and their files are removed: the strategy finds BN by type, and the node's "
        "state keeps it. Lists of "
        "arrays stay."
    ),
}


def page() -> str:
    """Return the text of projects.md."""
    shown: dict[tuple[str, ...], str] = {}
    return (
        "\n\n".join([INTRODUCTION.strip(), *(section(project, shown) for project in PROJECTS)])
        + "\n"
    )


def section(project: str, shown: dict[tuple[str, ...], str]) -> str:
    """Return what changes in a project.

    Lines that change as in one that was shown are not shown again.
    """
    parts = [f"## {project}", fill(PROJECTS[project], 120)]
    _, *pieces = re.split(
        r"^--- (.+)\n\+{3} .+\n",
        (EXAMPLES / project / "changes.diff").read_text(),
        flags=re.MULTILINE,
    )
    changes_of = dict(zip(pieces[::2], pieces[1::2], strict=True))
    for name in ("client_app.py", "server_app.py"):
        changes = changes_of[name].splitlines()
        earlier = shown.setdefault(tuple(line for line in changes if line[0] in "+-"), project)
        if earlier == project:
            parts += [f"`{name}`:", "\n".join(["```diff", *changes, "```"])]
        else:
            parts.append(f"`{name}` changes as in `{earlier}`.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
