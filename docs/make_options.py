"""Write options.md, the run configuration in pyproject.toml, and the table of methods.md: `make
docs`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fedbn_flwr.experiments.config import Config, options_by_group
from fedbn_flwr.experiments.experiment import ANEW, ENGINE, REUSE
from fedbn_flwr.experiments.flower_run import AUTO
from fedbn_flwr.experiments.method import all_options, forms_of, own_options, owners
from fedbn_flwr.plugins.options import Option, as_value
from fedbn_flwr.strategies import REGISTRY, FedAvg

PAGE = Path(__file__).with_name("options.md")
METHODS, PROJECT = PAGE.with_name("methods.md"), PAGE.parent.parent / "pyproject.toml"

INTRODUCTION = """\
# Options

This page is written from the code by `make docs`. The same names are used everywhere:

- on the command line: `fedbn-flwr run --method fedprox --mu 0.1 --lr 0.05`;
- inside a method: `fedbn-flwr compare --methods fedavg,fedprox:mu=0.1:lr=0.05`. This applies to one method only, and
  overrides the command line;
- in Flower's run configuration: `flwr run . --run-config "method='fedprox' mu=0.1 lr=0.05"`.

An unknown option, one that the method lacks, and an invalid value are errors with exit code 2. In a comparison, an
option of single strategies is for those methods that have it. `--help-all` of a command shows all options.

**In Flower's run configuration**, some things differ:

- A relative `results-dir` starts where the SuperLink was started. Use an absolute path, or look at the last line of the
  log.
- An option of a strategy that is `""` counts as not given.
- Options of plugins have no keys. Give them inside `method`.
- `engine` is `auto` by default ([With `flwr run`](simulation.md#with-flwr-run)).
"""

DOCSTRINGS = """\
The docstring of a strategy, in `strategies/` and in the [API reference](reference/strategies.md), says more.
"""

COMMAND = (
    (
        "`--engine`",
        "`stacked`",
        "`stacked`: train many clients at once, as one stack of models; `inprocess`: train one "
        "client after another, "
        "with the same bits everywhere; both run in this process, or in each of `workers`. `ray`: "
        "Flower's "
        "simulation, on its own Ray or the cluster at `RAY_ADDRESS`. See "
        "[simulation.md](simulation.md)",
    ),
    ("`--verbose`", "", "show Flower's own log, round by round"),
    (
        "`--reuse`",
        "",
        "take results that were made with code or data of your own, and go on with unfinished "
        "ones; without it, and "
        "without `--anew`, the command stops before it trains ([Runs are "
        "kept](simulation.md#runs-are-kept))",
    ),
    ("`--anew`", "", "train again what has results, and move these into the run's folder `before`"),
    ("`--methods`", "", "of `compare`: comma-separated methods"),
    (
        "`--seeds`",
        "`1`",
        "of `compare`: runs per method, with seeds from `seed` on. The table then shows mean, "
        "standard deviation, and "
        "the paired difference to the first method with its 95 % interval",
    ),
    (
        "`--grid`",
        "",
        "of `compare`: an option and values to choose from, such as `lr=0.03,0.1`; may be "
        "repeated. Each method with "
        "the option uses the combination with the best mean score on a fifth of the training "
        "data, held out. A value "
        "that fails with one seed is out. A `*` marks a chosen value that is the least or the "
        "largest of its grid. A "
        "grid with an invalid combination is refused as a whole",
    ),
    (
        "`--grid-seeds`",
        "`2`",
        "of `compare` and `reproduce`: runs for each combination of a grid's values",
    ),
    ("`--batches`", "`4`", "of `diagnose`: mini-batches per client to average over"),
    ("`--dry-run`", "", "of `compare`: show what would run, and how many steps"),
    ("`--smoke`, `--only`, `--dry-run`, ...", "", "of `reproduce`: see [recipes.md](recipes.md)"),
)


def page() -> str:
    """Return the text of options.md."""
    sections = [
        INTRODUCTION,
        "## For the command only",
        table(("option", "default", "meaning"), COMMAND),
        "## For all methods",
        *grouped(options_by_group()),
        "### Strategies",
        "Some strategies refuse those that would do nothing for them:",
        options(own_options(FedAvg)),
        "## For single strategies",
        DOCSTRINGS,
        table(("option", "of", "default", "meaning"), single_strategies()),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def single_strategies() -> Iterator[tuple[str, ...]]:
    """Yield a row for each option that not all strategies have, or have with another default."""
    shared = own_options(FedAvg)
    for key in all_options():
        for form, names in forms_of(key).items():
            if key not in shared or form.default != shared[key].default:
                yield (
                    code(key),
                    ", ".join(map(code, names)),
                    code(as_value(form.default)),
                    form.help,
                )


def with_run_config(project: str) -> str:
    """Return the text of pyproject.toml with a key for every option: Flower refuses to override any
    other.
    """
    lines = ["# by whom the nodes are trained: see docs/simulation.md", f'{ENGINE} = "{AUTO}"']
    lines += ["# results that are there and were made with code of your own: taken, or set aside"]
    lines += [f"{REUSE} = false", f"{ANEW} = false"]
    lines += ["# options that all methods share"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in Config().to_mapping().items()]
    lines += ["# options of strategies; an empty text is the strategy's own default"]
    lines += [f'{key} = ""  # {whose(key)}' for key in all_options()]
    section = "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n\n"
    return re.sub(
        r"\[tool\.flwr\.app\.config\]\n.*?\n\n", lambda _: section, project, flags=re.DOTALL
    )


def with_methods(methods: str) -> str:
    """Return the text of methods.md with a row for every method, FedAvg's first."""
    rows = [
        (
            code(name),
            does(each),
            re.sub(r"arXiv:(\S+)", r"[\g<0>](https://arxiv.org/abs/\1)", each.paper),
        )
        for name, each in sorted(REGISTRY.items(), key=lambda item: (item[0] != "fedavg", item[0]))
    ]
    heads = ("method", "what it does", "paper")
    return re.sub(
        r"\| method \| what it does.*?\n\n",
        lambda _: f"{table(heads, rows)}\n\n",
        methods,
        flags=re.DOTALL,
    )


def does(strategy: type[FedAvg]) -> str:
    """Return the first line of a docstring, as the cell of a table."""
    summary = (strategy.__doc__ or "").partition("\n\n")[0]
    line = " ".join(summary.split()).removesuffix(".")
    return line if line.startswith(("BN", "Fed")) else line[0].lower() + line[1:]


def whose(key: str) -> str:
    """Return the strategies that have an option."""
    names = owners(key)
    return "all strategies" if len(names) == len(REGISTRY) else ", ".join(names)


def grouped(groups: Mapping[str, Mapping[str, Option]]) -> Iterator[str]:
    """Yield the heading and the table of each group of options."""
    for name, items in groups.items():
        yield f"### {name.capitalize()}"
        yield options(items)


def options(items: Mapping[str, Option]) -> str:
    """Return a table of options."""
    rows = ((code(key), code(as_value(item.default)), item.help) for key, item in items.items())
    return table(("option", "default", "meaning"), rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)


def escaped(cell: str) -> str:
    """Return the text of a cell, in which nothing is the edge of a cell or a link."""
    return cell.replace("|", r"\|").replace("][", r"]\[")


def code(value: object) -> str:
    """Return a name or a default as code, and nothing for an empty one."""
    return (
        f"`{str(value).lower() if isinstance(value, bool) else value}`"
        if value not in ("", None)
        else ""
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    METHODS.write_text(with_methods(METHODS.read_text()))
    written = PROJECT.read_text()
    # a newer file would have everything installed again
    if (project := with_run_config(written)) != written:
        PROJECT.write_text(project)
