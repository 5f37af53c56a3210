"""What ran and how: versions, command, machine and options, from the files of the runs."""

from collections.abc import Iterator, Sequence

from fedbn_flwr.experiments.reports.sources import Run, Source

#: keys of `config.json` that tell the machine
MACHINE = ("hardware", "cores", "system")


def facts(source: Source) -> list[tuple[str, str]]:
    """Return the facts that the report names, each with its name; different values of the runs side by side."""
    commands = (
        [source.record.command]
        if source.record
        else _different(str(run.config.get("command", "")) for run in source.runs)
    )
    versions = _different(_versions(run) for run in source.runs)
    machines = _different(", ".join(_machine(run)) for run in source.runs)
    named = [("command", commands), ("versions", versions), ("machine", machines)]
    return [(name, text) for name, texts in named for text in texts]


def options_in_common(runs: Sequence[Run]) -> dict[str, str]:
    """Return the options that all begun runs share."""
    begun = [run.options for run in runs if run.options]
    first = begun[0] if begun else {}
    return {key: str(value) for key, value in first.items() if all(other.get(key) == value for other in begun)}


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.config.get("versions", {}).items())


def _machine(run: Run) -> Iterator[str]:
    for key in MACHINE:
        if value := run.config.get(key):
            yield f"{value} cores" if key == "cores" else str(value)


def _different(texts: Iterator[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
