"""Flower's SuperLink, in which a request waits a minute for the database in place of five seconds.

Takes the arguments of `flower-superlink`. The database is an SQLite file, with one writer at a time. Where a server's
cores are overloaded the writer can stand still for longer than Flower lets others wait; their requests then end with
"database is locked", and what a site has sent is lost.
"""

from importlib.metadata import entry_points
from typing import Any

from flwr.supercore import sql_mixin

#: milliseconds for which a request waits for the database
PATIENCE = 60_000
_WAITING = "busy_timeout"


def main() -> None:
    """Run a SuperLink until it is told to end."""
    wait_longer()
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    command.load()()


def wait_longer() -> None:
    """Let every connection to the database that is opened from now on wait for `PATIENCE`."""
    flower: Any = sql_mixin
    others = [pragma for pragma in flower.SQLITE_PRAGMAS if pragma[0] != _WAITING]
    flower.SQLITE_PRAGMAS = ((_WAITING, str(PATIENCE)), *others)


if __name__ == "__main__":
    main()
