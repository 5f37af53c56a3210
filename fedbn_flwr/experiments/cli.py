"""The console command `fedbn-flwr`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from fedbn_flwr import __version__
from fedbn_flwr.experiments.choice import SEEDS
from fedbn_flwr.experiments.config import ResultsOptions, options_by_group
from fedbn_flwr.experiments.diagnose import run_diagnosis
from fedbn_flwr.experiments.doctor import run_doctor
from fedbn_flwr.experiments.engines import ENGINES, engine_named
from fedbn_flwr.experiments.experiment import import_plugins
from fedbn_flwr.experiments.laboratory import compare, run, study_of
from fedbn_flwr.experiments.method import all_options, forms_of, owners, split_methods
from fedbn_flwr.experiments.recipes.commands import (
    CHANGES,
    list_names,
    list_recipes,
    reproduce,
    show_plan,
)
from fedbn_flwr.experiments.recipes.schema import SUFFIXES
from fedbn_flwr.experiments.results.page import WRITERS, report
from fedbn_flwr.experiments.results.plots import draw_or_warn
from fedbn_flwr.experiments.results.rows import read_parts
from fedbn_flwr.experiments.results.show import show_part
from fedbn_flwr.experiments.stopping import Terminated
from fedbn_flwr.experiments.study import quiet
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import Option, UsageError, as_value, whole_number
from fedbn_flwr.strategies import REGISTRY, CannotTrainError

#: options that the help shows; `--help-all` shows all
COMMON = ("method", "model", "dataset", "partition", "clients", "rounds", "lr", "results-dir")
EXAMPLES = {
    "run": (
        "--method fixbn:freeze-round=0.3 --partition classes:2",
        "--method fedavg+gn --model resnet20 --lr 0.05",
    ),
    "compare": (
        "--methods fedavg,fedavg+gn,fixbn --seeds 3",
        "--methods fedavg,fedprox:mu=0.01 --grid lr=0.1,0.03",
    ),
    "diagnose": ("--model resnet20 --partition classes:2",),
}


def main(arguments: Sequence[str] | None = None, others: Mapping[str, str] | None = None) -> int:
    """Run the command; 0 is success, 2 bad input, 1 any other failure.

    `others` are commands that a caller handles itself, with their help: here they are only shown.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # tests and notebooks put others in their place
                stream.reconfigure(errors="replace")  # the encoding of a terminal may lack a "±"
        words = sys.argv[1:] if arguments is None else arguments
        plugins = _plugins(words)
        # where `package.module:function` may be, which a console command does not look into by
        # itself
        if plugins or not _reads_files(words):
            sys.path.append(os.getcwd())
        # before the parser is made: it has an option for each of theirs
        import_plugins(plugins)
        options = vars(_parser(others or {}, "--help-all" in words).parse_args(words))
        command = options.pop("command")
        with quiet(verbose=options.get("verbose", False)):
            return _COMMANDS[command](options) or 0
    except UsageError as error:
        # in one line, whatever a library says
        print("fedbn-flwr:", *str(error).split(), file=sys.stderr)
        return 2
    except CannotTrainError as error:
        print(f"fedbn-flwr: {error}", file=sys.stderr)
        return 1
    except Terminated:
        return 143
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what was wrong in one line, and leaves the exit to `main`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option, equals, _ = unknown[0].partition("=")
            if not (option.startswith("-") or equals):
                self.error(f"{option!r} is no option: these begin with --")
            texts = {
                name: action.help or "" for name, action in self._option_string_actions.items()
            }
            meant = did_you_mean(option, texts, shown=f"`{self.prog} --help-all`", texts=texts)
            raise UsageError(f"unknown option {option!r}; {meant}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UsageError(
                f"unknown {action.dest} {value!r}; {did_you_mean(value, action.choices)}"
            )


def _reads_files(words: Sequence[str]) -> bool:
    """Return whether a command reads a recipe's file or a folder of results, which may be
    another's.
    """
    named = any(word.partition("=")[0] == "--resume" or word.endswith(SUFFIXES) for word in words)
    return named or words[:1] in (["results"], ["report"])


def _plugins(arguments: Sequence[str]) -> str:
    """Return the value of `--plugins`, whatever else the arguments hold."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugins", nargs="?", default="", const="")
    return str(parser.parse_known_args(arguments)[0].plugins)


def _parser(others: Mapping[str, str], everything: bool = False) -> argparse.ArgumentParser:
    """Make the parser; its help has every option, or those of `COMMON`."""
    parser = _Parser(
        prog="fedbn-flwr", description="Batch normalization in federated learning, side by side."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = _command(commands, "run", "train with one method")
    _add_engine(run, everything)
    _add_kept(run, everything)
    _add_shared(run, everything, skip=())
    several = _command(
        commands, "compare", "train with several methods on the same data, model and seeds"
    )
    several.add_argument("--methods", required=True, metavar="A,B", help="comma-separated methods")
    several.add_argument(
        "--seeds", default="1", metavar="N", help="runs per method, with seeds from --seed on [1]"
    )
    text = "choose on held-out data, e.g. lr=0.03,0.1"
    if everything:
        text += "; may be repeated"
    several.add_argument("--grid", action="append", metavar="KEY=A,B", help=text)
    _add_runs(several, everything)
    _add_engine(several, everything)
    _add_shared(several, everything, skip=("method", "resume"))
    single = _command(
        commands,
        "diagnose",
        "measure which mismatch of BN statistics the clients' data cause, without training",
    )
    single.add_argument(
        "--batches", default="4", metavar="N", help="mini-batches per client to average over [4]"
    )
    _add_shared(single, everything, skip=("resume", "checkpoint-every", "log-to"))
    doctor = _command(
        commands, "doctor", "run a Flower app for two rounds, and say what becomes of its BN"
    )
    doctor.add_argument(
        "app", nargs="?", default=".", metavar="APP", help="folder of a Flower app [.]"
    )
    for option, default, text in (
        ("nodes", "3", "nodes of the run"),
        ("rounds", "2", "rounds of training"),
        ("minutes", "10", "longest time"),
    ):
        doctor.add_argument(f"--{option}", default=default, metavar="N", help=f"{text} [{default}]")
    doctor.add_argument(
        "--model", metavar="MODULE:NAME", help="what makes the network, if no node calls one"
    )
    doctor.add_argument(
        "--run-config", dest="run-config", metavar="TEXT", help="values, as `flwr run` takes them"
    )
    doctor.add_argument("--verbose", action="store_true", help="show what the app prints")
    doctor.add_argument("--json", action="store_true", help="print it for programs")
    names = _command(
        commands,
        "list",
        "show every strategy, normalizer, model, data set, partition and augmentation",
    )
    names.add_argument(
        "name", nargs="?", metavar="NAME", help="say all about this one, or about all of a kind"
    )
    names.add_argument(
        "--plugins", metavar="MODULES", help="comma-separated modules to import first"
    )
    names.add_argument("--json", action="store_true", help="print JSON")
    known = _command(
        commands, "recipes", "list the papers' tables and figures that can be reproduced"
    )
    known.add_argument("--json", action="store_true", help="print it for programs")
    again = _command(commands, "reproduce", "run a recipe: a table, a figure, or your matrix")
    again.add_argument(
        "recipe", metavar="RECIPE", help="name, as in fixbn/table5, or a file that ends in .yaml"
    )
    again.add_argument(
        "--smoke", action="store_true", help="run the same cells in small, on embedded data"
    )
    again.add_argument(
        "--only",
        action="append",
        metavar="LABEL",
        help="only cells with this label; may be repeated",
    )
    _add_runs(again, everything=True)
    again.add_argument("--seeds", metavar="N", help="runs a method, instead of the recipe's number")
    again.add_argument(
        "--results-dir", dest="results-dir", metavar="DIR", help="where results go [results/NAME]"
    )
    _add_engine(again, everything=True)
    for key in CHANGES:
        again.add_argument(
            f"--{key}",
            dest=key,
            metavar=key.upper().replace("-", "_"),
            help="as for `run`, for all runs",
        )
    shown = _command(commands, "results", "print the table of results again")
    page = _command(commands, "report", "write a page with tables and pictures of results")
    page.add_argument(
        "--out",
        metavar="DIR",
        help="where the page goes [RUNS/report, or results/report for several]",
    )
    text = f"comma-separated: {', '.join(WRITERS)} [html]"
    page.add_argument("--format", metavar="FORMATS", default="html", help=text)
    for each in (shown, page):
        each.add_argument(
            "runs", nargs="+", metavar="RUNS", help="folders of `run`, `compare` or `reproduce`"
        )
        each.add_argument(
            "--plugins", metavar="MODULES", help="comma-separated modules to import first"
        )
    for name, text in others.items():
        commands.add_parser(name, help=text)
    return parser


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    lines = "\n".join(f"  fedbn-flwr {name} {words}" for words in EXAMPLES.get(name, ()))
    epilog = None
    if lines:
        epilog = f"examples:\n{lines}\nall options: --help-all; all names: fedbn-flwr list"
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        # keeps the lines of examples, and most options with their texts on one line
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=20),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    return parser


def _add_kept(parser: argparse.ArgumentParser, everything: bool) -> None:
    """Add the options that say what becomes of results that are there."""
    texts = {
        "reuse": "take results that were made with code or data of your own",
        "anew": "train again what has results, which are set aside",
    }
    for name, text in texts.items():
        about = text if everything else argparse.SUPPRESS
        parser.add_argument(f"--{name}", action="store_true", default=False, help=about)


def _add_runs(parser: argparse.ArgumentParser, everything: bool) -> None:
    """Add the options of commands that have several runs."""
    _add_kept(parser, everything)
    if everything:
        text = f"runs of a grid's values [{SEEDS}]"
    else:
        text = argparse.SUPPRESS
    parser.add_argument("--grid-seeds", dest="grid-seeds", metavar="N", help=text)
    text = "show what would run, and how many steps"
    parser.add_argument("--dry-run", dest="dry-run", action="store_true", default=False, help=text)
    if everything:
        text = "methods that run at once in their settings, each in a process [1]"
    else:
        text = argparse.SUPPRESS
    parser.add_argument("--side-by-side", dest="side-by-side", metavar="N", help=text)


def _add_engine(parser: argparse.ArgumentParser, everything: bool) -> None:
    engine = f"{', '.join(ENGINES)} [stacked]"
    verbose = "show Flower's own log"
    parser.add_argument("--engine", help=engine if everything else argparse.SUPPRESS)
    parser.add_argument(
        "--verbose",
        action="store_true",
        default=False,
        help=verbose if everything else argparse.SUPPRESS,
    )


def _add_shared(parser: argparse.ArgumentParser, everything: bool, skip: Sequence[str]) -> None:
    # a list of all would fill a screen by itself
    parser.usage = "%(prog)s [--OPTION VALUE]..."
    parser.add_argument(
        "--help-all", action="help", help="show all options" if everything else argparse.SUPPRESS
    )
    if everything:
        parser._option_string_actions["--help"].help = "show common options"
    else:
        parser._option_string_actions["--help"].help = argparse.SUPPRESS
    for name, options in options_by_group().items():
        group: Any = parser.add_argument_group(name) if everything else parser
        for key, option in options.items():
            if key not in skip:
                shown = everything or key in COMMON
                _add_option(group, key, {option: ()}, shown, brief=not everything)
    group = parser.add_argument_group("options of single strategies")
    for key in all_options():
        if f"--{key}" in {"--command", *parser._option_string_actions}:
            raise UsageError(
                f"strategy {owners(key)[0]!r}: the option {key!r} of its constructor is the "
                "command's own"
            )
        _add_option(group, key, forms_of(key), shown=everything)


def _add_option(
    group: Any, key: str, forms: Mapping[Option, Sequence[str]], shown: bool, brief: bool = False
) -> None:
    texts = []
    for option, names in forms.items():
        if brief:
            about = option.help.partition(";")[0]
        else:
            about = option.help
        default = as_value(option.default)
        if len(names) == len(REGISTRY):
            whose = "all strategies"
        else:
            whose = ", ".join(names)
        if default not in ("", None):
            about += f" [{default}]"
        if names:
            about += f" ({whose})"
        texts.append(about)
    if shown:
        text = "; ".join(texts).replace("%", "%%")
    else:
        text = argparse.SUPPRESS
    group.add_argument(
        f"--{key}", dest=key, metavar="X" if brief else key.replace("-", "_").upper(), help=text
    )


def _run(options: dict[str, Any]) -> None:
    folder = options.pop("results-dir", ResultsOptions.results_dir)
    results = run(options.pop("method", None), folder=folder, **options)
    results.show()
    draw_or_warn(results.plot, results.folder / "curves.png")


def _compare(options: dict[str, Any]) -> None:
    methods = split_methods(str(options.pop("methods")))
    folder = options.pop("results-dir", ResultsOptions.results_dir)
    asked: dict[str, Any] = {
        "seeds": whole_number("--seeds", options.pop("seeds")),
        "grid_seeds": whole_number("--grid-seeds", options.pop("grid-seeds", SEEDS)),
        "side_by_side": whole_number("--side-by-side", options.pop("side-by-side", 1)),
        "grid": _read_grid(options.pop("grid", [])),
        "engine": engine_named(options.pop("engine", None)),
    }
    how = {key: options.pop(key) for key in ("verbose", "reuse", "anew")}
    if options.pop("dry-run"):
        show_plan("comparison", study_of(methods, options, **asked).runs(Path(folder)))
        return
    results = compare(methods, folder=folder, **how, **asked, **options)
    results.show()
    if any("failed" not in summary for summary in results.summaries):
        draw_or_warn(results.plot, results.folder / "curves.png")
    errors = {method for method, _ in results.failures}
    failed = [method for method in methods if method in errors]
    if failed:
        raise CannotTrainError(
            f"{len(failed)} of {len(methods)} methods failed: {', '.join(failed)}"
        )


def _read_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read `KEY=VALUE,VALUE` texts."""
    grid = dict[str, list[str]]()
    for text in texts:
        key, _, values = text.partition("=")
        if key in grid:
            raise UsageError(f"--grid names {key!r} twice: write its values with commas")
        grid[key] = [value.strip() for value in values.split(",") if value.strip()]
        if not grid[key]:
            raise UsageError(
                f"--grid must be OPTION=VALUE,VALUE, such as lr=0.03,0.1, got {text!r}"
            )
    return grid


def _results(options: dict[str, Any]) -> None:
    for part in read_parts([Path(name).expanduser() for name in options["runs"]]):
        show_part(part)


_COMMANDS: dict[str, Callable[[dict[str, Any]], int | None]] = {
    "run": _run,
    "compare": _compare,
    "diagnose": run_diagnosis,
    "doctor": run_doctor,
    "list": list_names,
    "recipes": list_recipes,
    "reproduce": reproduce,
    "results": _results,
    "report": report,
}
