"""The command: time every engine at every case, in turn with a bare PyTorch loop."""

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from benchmarks.cases import (
    CLIENTS,
    DEFAULT,
    FASTEST,
    IN_JAX,
    METHODS,
    MODELS,
    SHORT_METHODS,
    Case,
    Variant,
    make_cases,
)
from benchmarks.driver import Effort, EngineProcess, measure
from benchmarks.engines import ENGINES, ON_RAY
from benchmarks.results import BARE, Row, line_of, machine, rows_of, table, write
from fedbn_flwr.device import count_cores, pick_device
from fedbn_flwr.experiments.engines import one_step
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.simulation.sizing import clients_that_fit


@dataclass(frozen=True)
class Settings:
    """What is measured, and for how long."""

    engines: Sequence[str] = (BARE, "sequential", "stacked", "actors", "ray")
    models: Sequence[str] = MODELS
    methods: Sequence[str] = METHODS
    clients: Sequence[int] = CLIENTS
    #: methods that few clients also run with a single local step
    short_methods: Sequence[str] = SHORT_METHODS
    variants: Sequence[Variant] = (DEFAULT,)
    device: str = "auto"
    repetitions: int = 7
    seconds: float = 30.0
    most_rounds: int = 20
    #: after which no case begins
    minutes: float = math.inf
    #: Ray keeps a process busy for every client in turn, and takes minutes a round with more
    #: clients than this
    most_on_ray: int = 100
    #: whose processes serve all cases of a model and number of clients, because they take long to
    #: start
    lasting: Sequence[str] = ON_RAY
    results_dir: str = "results"

    def cases(self) -> list[Case]:
        """Return all cases."""
        return make_cases(
            self.models, self.methods, self.clients, self.device, self.short_methods, self.variants
        )


QUICK = Settings(clients=(10,), repetitions=3, seconds=1.0, most_rounds=10)
#: on a GPU, each in a process for all cases
ON_GPU = (BARE, "captured", "stacked", *(["jax"] if find_spec("jax") else []))
GPU = Settings(
    engines=ON_GPU,
    models=("small-cnn:8", "resnet20:32"),
    methods=("fedavg", "fedtan"),
    clients=(10, 100),
    short_methods=(),
    variants=(FASTEST, DEFAULT),
    device="cuda",
    repetitions=3,
    seconds=1.0,
    minutes=4.5,
    lasting=ON_GPU,
    results_dir="results/gpu",
)


@dataclass
class Bench:
    """A run over cases that writes each row at once."""

    settings: Settings
    folder: Path
    rows: list[Row] = field(default_factory=list)

    def measure(self, cases: Sequence[Case]) -> int:
        """Measure cases until the time is over, and return how many were left."""
        end, done = time.monotonic() + 60 * self.settings.minutes, 0
        for _, group in groupby(
            cases, key=lambda case: (case.model, case.size, case.clients, case.options)
        ):
            alike = list(group)
            with ExitStack() as stack:
                lasting = {
                    stack.enter_context(EngineProcess(engine, 1, its_cases)): its_cases
                    for engine in self.settings.lasting
                    if (its_cases := [case for case in alike if self._goes_to(engine, case)])
                }
                for case in alike:
                    if time.monotonic() > end:
                        return len(cases) - done
                    self._measure(
                        case,
                        [process for process, its_cases in lasting.items() if case in its_cases],
                    )
                    done += 1
        return 0

    def _goes_to(self, engine: str, case: Case) -> bool:
        """Whether an engine takes part.

        Flower's does not with one local step, where the round is Ray's polling, as it is with five.
        """
        asked = self.settings
        if engine not in asked.engines:
            return False
        if engine == "ray":
            return case.clients <= asked.most_on_ray and case.local_steps > 1
        if engine == "jax":
            return case.is_plain and case.model in IN_JAX
        return engine not in ("captured", "pfl") or case.is_plain

    def _measure(self, case: Case, lasting: Sequence[EngineProcess]) -> None:
        """Measure a case; every other engine gets a new process for it, so that its memory can be
        told.
        """
        asked = self.settings
        # FedTAN's clients each wait in a thread of their own, which several of torch's make no
        # faster, and to their exchanges the loop has no counterpart
        threads = [1] if case.layerwise else sorted({1, count_cores()})
        own = [
            (engine, number)
            for engine in dict.fromkeys((BARE, *asked.engines))
            if engine not in asked.lasting and (engine == BARE or self._goes_to(engine, case))
            for number in (threads if engine in (BARE, "sequential") else [1])
        ]
        with ExitStack() as stack:
            fresh = [
                stack.enter_context(EngineProcess(engine, number, [case])) for engine, number in own
            ]
            effort = Effort(asked.repetitions, asked.seconds, asked.most_rounds)
            rows = rows_of(case, measure(case, [*fresh, *lasting], effort))
        if pick_device(case.device).type != "cpu":
            fitting = clients_that_fit(
                one_step(Material.of(case.experiment().config)), pick_device(case.device)
            )
            rows = [{**row, "fitting": fitting} for row in rows]
        self.rows += rows
        write(self.folder / "bench.json", self.rows)
        for row in rows:
            print(line_of(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write `bench.json`, `bench.md` and `bench-machine.json`, and show the table."""
    given = {
        name: value
        for name, value in vars(make_parser().parse_args(arguments)).items()
        if value is not None
    }
    settings = replace(given.pop("preset"), **given)
    try:
        pick_device(settings.device)
    except ValueError as error:
        print(error)
        return 2
    folder = make_folder(Path(settings.results_dir))
    write(folder / "bench-machine.json", {**machine(), "settings": vars(settings)})
    bench, cases = Bench(settings, folder), settings.cases()
    left = bench.measure(cases)
    note = (
        f"\n{left} of {len(cases)} cases were not measured in {settings.minutes:g} minutes.\n"
        if left
        else ""
    )
    (folder / "bench.md").write_text(table(bench.rows) + note)
    print(table(bench.rows) + note)
    for failed in dict.fromkeys(
        f"failed: {row['engine']}: {row['error']}" for row in bench.rows if "error" in row
    ):
        print(failed)
    return 1 if all("error" in row for row in bench.rows) else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; what is not given is that of the preset."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument(
        "--quick", dest="preset", action="store_const", const=QUICK, help="few clients and rounds"
    )
    parser.add_argument(
        "--gpu",
        dest="preset",
        action="store_const",
        const=GPU,
        help="a GPU's cases, in five minutes",
    )
    parser.add_argument(
        "--engines",
        type=_engines,
        help=f"comma-separated, of {', '.join(ENGINES)} [{','.join(Settings.engines)}]",
    )
    parser.add_argument(
        "--models", type=_words, help=f"such as resnet20:32 on 32 x 32 [{','.join(MODELS)}]"
    )
    parser.add_argument("--methods", type=_words, help=f"comma-separated [{','.join(METHODS)}]")
    parser.add_argument("--clients", type=_numbers, help="comma-separated [10,100,1000; quick: 10]")
    parser.add_argument("--repetitions", type=int, help="turns of every engine [7; quick: 3]")
    parser.add_argument(
        "--seconds", type=float, help="of timed rounds an engine and case [30; quick: 1]"
    )
    parser.add_argument("--minutes", type=float, help="after which no case begins")
    parser.add_argument("--device", help="cpu, cuda or auto [auto]")
    parser.add_argument(
        "--most-on-ray", type=int, help="the most clients with Flower's simulation [100]"
    )
    parser.add_argument("--results-dir", help="where results go [results]")
    parser.set_defaults(preset=Settings())
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _engines(text: str) -> list[str]:
    for word in _words(text):
        if word not in ENGINES:
            raise argparse.ArgumentTypeError(
                f"unknown engine {word!r}; known: {', '.join(ENGINES)}"
            )
    return _words(text)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


if __name__ == "__main__":
    raise SystemExit(main())
