"""The engines: stacks or single clients in this process or in several of this machine, or Flower's
Ray simulation.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app, keep_states_in
from fedbn_flwr.device import count_cores
from fedbn_flwr.experiments.checkpoint import STATES, read_checkpoint
from fedbn_flwr.experiments.checks import check_simulation, refuse_own_nodes
from fedbn_flwr.experiments.client_side import bound_client_fn, place_of
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.experiment import Experiment, import_plugins
from fedbn_flwr.experiments.material import Material, expected_steps, set_up_process
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.runs import Engine
from fedbn_flwr.experiments.server_side import instruction_of, play, run_on_grid, set_up_here
from fedbn_flwr.experiments.stopping import SIDE_BY_SIDE
from fedbn_flwr.plugins import did_you_mean, extra, fingerprint, is_foreign
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.processes.service import GridFactory
from fedbn_flwr.simulation.processes.worker import Worker, preload
from fedbn_flwr.simulation.sizing import (
    StepMemory,
    Work,
    clients_that_fit,
    count_multiplications,
    keep_freed_memory,
    useful_workers,
    visible_gpus,
    worthwhile_workers,
)
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid
from fedbn_flwr.state import to_record
from fedbn_flwr.strategies import BaseStrategy, Layerwise
from fedbn_flwr.transports import message_client

#: makes the grid of some partitions' nodes of what they work with
MakeGrid = Callable[[Material, Sequence[int]], InProcessGrid]
#: the address of a Ray that is only for this run
LOCAL = "local"
#: what every worker needs, and takes seconds to import
NEEDED = (__name__,)


def count_workers(material: Material, layerwise: bool = False) -> int:
    """Return the number of processes of the stacked engine: `workers`, or as many as are worth it.

    The rule knows the model, the sizes of its activations, the number of clients and steps, the
    cores and the options, and nothing that is measured.
    """
    config = material.config
    if config.engine.workers:
        return min(config.engine.workers, config.clients)
    if SIDE_BY_SIDE.is_set():  # each of the runs has one
        return 1
    gpus = visible_gpus(config.engine.device)
    return worthwhile_workers(work_of(material, layerwise), gpus, count_cores())


def work_of(material: Material, layerwise: bool) -> Work:
    """Return what a run asks of its processes."""
    config = material.config
    train = material.data.train
    # two samples, for layers that normalize over the batch also when they do not learn
    both = torch.zeros(2, dtype=torch.int64)

    def multiplications() -> int:
        return count_multiplications(material.model, train.batch(both, torch.device("cpu"))[0])

    return Work(
        material.model,
        material.device,
        layerwise,
        config.clients_in_round(),
        expected_steps(config, len(train)) * config.training.batch_size,
        multiplications,
        partial(one_step, material),
    )


def one_step(material: Material) -> StepMemory:
    """Return what a client's step on a mini-batch of the training data keeps in memory."""
    few = np.arange(min(len(material.data.train), material.config.training.batch_size))
    client = replace(material, partition=[few]).client(0)
    return StepMemory.of(client, instruction_of(material.config))


def _weighting_if_averaged(config: Config, strategy: BaseStrategy) -> str:
    """Return by what stacks can average their nodes' replies.

    The text is empty if the server needs them one by one.
    """
    single = config.results.record_dynamics or strategy.needs_single_replies
    # a user's own hooks may look at whatever they like
    if single or is_foreign(type(strategy)):
        return ""
    return strategy.weighting


def open_grid(
    material: Material, strategy: BaseStrategy, folder: Path, engine: str, bound_here: bool = False
) -> AbstractContextManager[InProcessGrid | WorkersGrid]:
    """Make the grid of all clients, in this process or shared out over several, which are ended
    afterwards.

    The engine `stacked` has as many processes as `count_workers` says, and with `RAY_ADDRESS` in
    the environment its workers are on the cluster that is there. What is `bound_here` cannot be
    sent to others.
    """
    config = material.config
    layerwise = isinstance(strategy, Layerwise)
    make_grid = partial(
        node_grid, layerwise, folder.resolve(), engine, _weighting_if_averaged(config, strategy)
    )
    workers = min(config.engine.workers, config.clients)
    if engine == "stacked" and not bound_here:
        if _cluster() != LOCAL:
            return open_on_cluster(make_grid, material, layerwise)
        workers = count_workers(material, layerwise)
    if workers <= 1:
        return nullcontext(make_grid(material, range(config.clients)))
    preload(NEEDED)
    return spread_over(workers, partial(make_grid, material), config)


@contextmanager
def open_on_cluster(
    make_grid: MakeGrid, material: Material, layerwise: bool
) -> Iterator[WorkersGrid]:
    """Share the nodes out over a Ray cluster: a worker a GPU, or without GPUs one for each useful
    processor.
    """
    config = material.config
    with extra("simulation"):
        from fedbn_flwr.simulation.processes import ray_worker
    with ExitStack() as stack:
        has = stack.enter_context(ray_worker.joined(_cluster()))
        if config.engine.device == "cpu":
            gpus = 0
        else:
            gpus = int(has.get("GPU", 0))
        cores = int(has.get("CPU", 0)) // max(config.engine.threads, 1)
        workers = (
            config.engine.workers
            or min(gpus, config.clients_in_round())
            or useful_workers(work_of(material, layerwise), cores)
        )
        cluster = ray_worker.Cluster(
            min(workers, config.clients), config.engine.threads, gpu=gpus > 0
        )
        stack.callback(cluster.close)
        ready = partial(_elsewhere, make_grid, config)
        grid = stack.enter_context(
            WorkersGrid(
                ready, config.clients, workers, threads=config.engine.threads, start=cluster
            )
        )
        for worker in cluster.workers:
            clients = len(range(worker.index, config.clients, len(cluster.workers)))
            print(f"worker {worker.index}: {worker.where()}, {clients} clients", file=sys.stderr)
        yield grid


def node_grid(
    layerwise: bool,
    folder: Path,
    engine: str,
    average_by: str,
    material: Material,
    partitions: Sequence[int],
) -> InProcessGrid:
    """Make the grid that trains the clients of these partitions, in stacks or one after another."""
    config = material.config
    max_steps = 0
    set_up_process(config.engine)
    if layerwise and len(partitions) > message_client.MAX_STEPS:
        # further clients replay the step; the other clients may be in other processes of this
        # machine
        fitting = clients_that_fit(one_step(material), material.device)
        max_steps = min(len(partitions), fitting * len(partitions) // config.clients)

    def client_fn(context: Context) -> BNClient:
        partition_id, _ = place_of(context)
        return material.client(partition_id, partition_id=partition_id, memory=context.state)

    app = client_app(client_fn, max_steps=max_steps)
    state_dir = run_state_folder(config.engine.state_dir, folder)
    if engine == "inprocess":
        return OneByOneGrid(app, config.clients, partitions=partitions, state_dir=state_dir)
    keep_freed_memory()
    return StackedGrid(
        app,
        config.clients,
        partitions=partitions,
        state_dir=state_dir,
        chunk=config.engine.chunk,
        average_by=average_by,
    )


def _elsewhere(make_grid: MakeGrid, config: Config, partitions: Sequence[int]) -> InProcessGrid:
    """Make a grid on another machine, which loads the data by itself."""
    import_plugins(config.plugins)
    return make_grid(Material.of(config), partitions)


def run_state_folder(state_dir: str, run: Path) -> Path | None:
    """Return the folder for the nodes' memory in one run, named by the path of its results; None
    keeps it in RAM.
    """
    if not state_dir:
        return None
    # runs of several comparisons at once have folders of the same name
    folder = Path(state_dir).expanduser() / f"{run.name}-{fingerprint(str(run))}"
    return make_folder(folder, f"state-dir {state_dir!r}")


def spread_over(workers: int, make_grid: GridFactory, config: Config) -> WorkersGrid:
    """Share the nodes out over this process and `workers` - 1 others."""
    gpus = visible_gpus(config.engine.device)

    def start(index: int, threads: int) -> Worker:
        return Worker(
            index, threads, {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
        )

    return WorkersGrid(
        make_grid, config.clients, workers, threads=config.engine.threads, here=True, start=start
    )


def run_with_grid(
    engine: str, experiment: Experiment, folder: Path, progress: Progress | None = None
) -> Summary:
    """Run with one client after another (`inprocess`) or with stacks of clients (`stacked`): no
    network.
    """
    material, strategy = check_simulation(experiment)
    saved = None
    if experiment.config.results.resume:
        saved = read_checkpoint(folder)
    initial = to_record(material.model.state_dict())  # before a step is tried with it
    with open_grid(material, strategy, folder, engine, bool(experiment.bound_here)) as grid:
        return play(
            set_up_here(grid, material, initial),
            experiment,
            strategy,
            folder,
            saved,
            progress,
            engine,
        )


def run_on_ray(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """Run in Flower's simulation engine: every client gets one processor, and all share the GPU
    where there is one.

    Ray is started for this run alone, or with `RAY_ADDRESS` in the environment it is the cluster
    that is there.
    """
    with extra("simulation"):
        import ray  # noqa: F401  # Flower's own error would name no package
    cluster = _cluster()
    from flwr.simulation import run_simulation

    # otherwise Ray hides the GPU from workers that reserve no part of it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

    config = experiment.config
    server = ServerApp()
    summaries = []
    # Flower keeps its nodes' states out of reach
    mods = None
    if config.results.checkpoint_every or config.results.resume:
        mods = [keep_states_in(folder.resolve() / STATES)]

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        summaries.append(run_on_grid(grid, experiment, folder, progress, "ray"))

    run_simulation(
        server,
        client_app(bound_client_fn(experiment.config), mods),
        num_supernodes=experiment.config.clients,
        backend_config={
            "init_args": {"address": cluster},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return summaries[0]


def _cluster() -> str:
    """The address of the Ray cluster that the environment names; `local` is one for this run only.

    Ray by itself would join whatever cluster was started last on this machine, and wait minutes for
    one that is not there.
    """
    address = os.environ.get("RAY_ADDRESS") or LOCAL
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise UsageError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
    return address


def prepare_engine(engine: Engine, experiment: Experiment, elsewhere: bool = False) -> None:
    """Refuse workers that an engine cannot have, and let those that it can have import while the
    run is checked.

    With `elsewhere` the run itself is in another process.
    """
    config = experiment.config
    bound = experiment.bound_here
    if bound and (config.engine.workers > 1 or elsewhere or engine is run_on_ray):
        raise UsageError(
            f"{bound} stays in this process, so workers and side-by-side must be 1, and the engine "
            "not ray; put it into a module, and name it as package.module:function, or the module "
            "of a registered strategy in plugins"
        )
    if engine is run_on_ray:
        refuse_own_nodes(config.engine)
    elif config.engine.workers > 1:
        preload(NEEDED)


def engine_named(name: str | None) -> str:
    """Return the engine's name, or that of the default one.

    A name that no engine has is a UsageError.
    """
    name = name or "stacked"
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}; {did_you_mean(name, ENGINES)}")
    return name


ENGINES: dict[str, Engine] = {
    **{engine: partial(run_with_grid, engine) for engine in ("stacked", "inprocess")},
    "ray": run_on_ray,
}
