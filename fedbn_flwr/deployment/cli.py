"""The console command `fedbn-flwr`: the deployment's commands here, all others in
`fedbn_flwr.experiments`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedbn_flwr import __version__
from fedbn_flwr.deployment import DeploymentError
from fedbn_flwr.deployment.operator import Operator, overview
from fedbn_flwr.plugins import MissingExtraError, extra
from fedbn_flwr.plugins.options import UsageError

#: the commands of this room, with their help
COMMANDS = {
    "provision": "make keys and configuration for a federation's server and sites",
    "site": "make a site's key, register or revoke a site",
    "preflight": "check at a site what it needs to take part",
    "status": "show a federation's sites and runs",
    "fetch": "copy the results of a run from the server",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 2 bad input, 1 any other failure."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        if words[:1] == ["--version"]:
            print(f"fedbn-flwr {__version__}")
            return 0
        if not words or words[0] not in COMMANDS:
            # takes seconds to import: only training pays
            with extra("cli"):
                from fedbn_flwr.experiments import main as run_experiments

            code = run_experiments(words, others=COMMANDS)
            sys.stdout.flush()
            return code
        options = vars(parser().parse_args(words))
        act: Callable[..., Iterable[object]] = options.pop("act")
        failed = 0
        for line in act(**options):
            print(line, flush=True)
            failed += getattr(line, "verdict", "") == "failed"
        return int(failed > 0)
    except (DeploymentError, MissingExtraError, UsageError) as error:
        print("fedbn-flwr:", *str(error).split(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of the output has seen enough: neither a traceback here, nor one when Python
        # flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # such as a full disk
        print(f"fedbn-flwr: {error}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Open streams that were closed (`>&-`), in this order, so that no file gets their numbers,
    here or in processes that are started.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DeploymentError(f"{message} (see `{self.prog} --help`)")


def parser() -> argparse.ArgumentParser:
    """Make the parser of this room's commands."""
    top = _Parser(prog="fedbn-flwr")
    commands = top.add_subparsers(required=True, parser_class=_Parser)
    make = _command(commands, "provision", COMMANDS["provision"], _provision)
    make.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="description of the federation (federation.example.yaml)",
    )
    make.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to make, or to complete"
    )
    _add_site(commands.add_parser("site", help=COMMANDS["site"], description=COMMANDS["site"]))
    check = _command(commands, "preflight", COMMANDS["preflight"], _preflight)
    check.add_argument("kit", type=Path, metavar="KIT", help="the site's kit")
    show = _command(commands, "status", COMMANDS["status"], _status)
    _add_operator(show)
    get = _command(commands, "fetch", COMMANDS["fetch"], _fetch)
    get.add_argument("run", metavar="RUN", help="number of the run")
    _add_operator(get)
    get.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="where to [results]"
    )
    return top


def _add_site(site: argparse.ArgumentParser) -> None:
    actions = site.add_subparsers(required=True, parser_class=_Parser)
    make = _command(
        actions, "init", "make the site's key, of which only the public half leaves it", _site_init
    )
    make.add_argument("kit", type=Path, metavar="KIT", help="the site's kit")
    show = _command(
        actions,
        "log",
        "show for each round what has left the site, and which app has run",
        _site_log,
    )
    show.add_argument("kit", type=Path, metavar="KIT", help="the site's kit")
    register = _command(actions, "register", "let the owner of a key take part", _site_register)
    register.add_argument(
        "keys", type=Path, nargs="+", metavar="SITE.pub", help="public halves, by the sites' names"
    )
    _add_operator(register)
    revoke = _command(actions, "revoke", "shut a site out", _site_revoke)
    revoke.add_argument("name", metavar="SITE", help="name of the site")
    _add_operator(revoke)


def _command(
    commands: Any, name: str, text: str, act: Callable[..., Iterable[object]]
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    made.set_defaults(act=act)
    return made


def _add_operator(command: argparse.ArgumentParser) -> None:
    default = Path("federation/operator")
    command.add_argument(
        "--operator",
        type=Path,
        default=default,
        metavar="DIR",
        help="the operator's folder [%(default)s]",
    )


def _provision(file: Path, out: Path) -> Iterator[str]:
    from fedbn_flwr.deployment.federation import Federation
    from fedbn_flwr.deployment.provision import provision

    yield from provision(Federation.read(file), out)
    yield (
        f"{out / 'ca'} belongs on no machine that is online, {out / 'server'} on the server, "
        "each kit to its site"
    )


def _site_init(kit: Path) -> Iterator[str]:
    from fedbn_flwr.deployment.provision import init_site

    yield f"give {init_site(kit)} to the operator; node.key stays here"


def _site_log(kit: Path) -> Sequence[str]:
    from fedbn_flwr.deployment.sent_log import read_log, rows_of

    path = kit / "log" / "sent.jsonl"
    if not path.exists():
        raise DeploymentError(
            f"there is no {path}: nothing has left {kit} yet, or its SuperNode logs elsewhere"
        )
    return rows_of(read_log(path))


def _site_register(keys: Sequence[Path], operator: Path) -> Iterator[str]:
    yield from (f"registered {key.stem} as node {Operator(operator).register(key)}" for key in keys)


def _site_revoke(name: str, operator: Path) -> Iterator[str]:
    yield f"revoked {name}, which was node {Operator(operator).revoke(name)}"


def _preflight(kit: Path) -> Iterator[object]:
    from fedbn_flwr.deployment.preflight import preflight

    failed = 0
    for check in preflight(kit):
        yield check
        failed += check.verdict == "failed"
    yield f"{failed} checks failed" if failed else "this site can take part"


def _status(operator: Path) -> Iterable[str]:
    return overview(Operator(operator))


def _fetch(run: str, operator: Path, out: Path) -> Iterable[Path]:
    return Operator(operator).fetch(run, out)
