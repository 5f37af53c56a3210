"""Flower's SuperLink, in which a request waits a minute for the database in place of five seconds.

Takes the arguments of `flower-superlink`. The database is an SQLite file, with one writer at a
time. Where a server's cores are overloaded the writer can stand still for longer than Flower lets
others wait; their requests then end with "database is locked", and what a site has sent is lost.
"""

from importlib.metadata import entry_points

from fedbn_flwr.deployment.flower_internals import wait_longer


def main() -> None:
    """Run a SuperLink until it is told to end."""
    wait_longer()
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    command.load()()


if __name__ == "__main__":
    main()
