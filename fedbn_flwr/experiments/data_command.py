"""The command `fedbn-flwr data check`."""

import argparse
from typing import Any

from fedbn_flwr.data.check import IMAGES, check_dataset, where_to_get
from fedbn_flwr.data.sets.catalog import CATALOG
from fedbn_flwr.plugins.options import UsageError, whole_number


def add_data_command(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Add the command to the others."""
    text = "check a data set's files: what is missing or broken, where to get it, under which licence"
    actions = commands.add_parser("data", help=text).add_subparsers(
        dest="action", required=True, parser_class=parser_class
    )
    check = actions.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument("name", metavar="NAME", help=", ".join(CATALOG))
    check.add_argument("path", metavar="PATH", help="its folder; of `hf` the name")
    check.add_argument(
        "--images", default=str(IMAGES), metavar="N", help=f"images to decode a split, 0: all [{IMAGES}]"
    )


def check_data(options: dict[str, Any]) -> int:
    """Print what a check finds; return 1 if something is missing or bad."""
    count, faults = whole_number("--images", options["images"], least=0), 0
    try:
        for finding in check_dataset(options["name"], options["path"], count):
            print(finding)
            faults += finding.verdict != "ok"
    except ValueError as error:
        raise UsageError(str(error)) from None
    if faults:
        print(*where_to_get(options["name"]), sep="\n")
    return int(faults > 0)
