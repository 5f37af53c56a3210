"""Faults of real processes: what is killed, cut off or wrong, and what becomes of the run.

`make faults` shows a table.

Whatever happens to the site south, the run ends, and its model has the bits of a run in process in
which south misses the same rounds.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.deployment.cli import main as fedbn_flwr
from fedbn_flwr.deployment.keys import make_node_key
from tests.helpers.checkout import ROOT
from tests.helpers.faulty_runs import SITES, FaultyRuns, kill_serverapp
from tests.helpers.federation import assert_same_results, await_that
from tests.helpers.processes import kill

pytestmark = pytest.mark.xdist_group("deployment")

#: in training, and in the middle of a step of FedTAN, before its second exchange
HELD: dict[str, dict[str, Any]] = {"fedavg": {}, "fedtan": {"exchange": 1}}
MOMENT = {"fedavg": "in training", "fedtan": "in a FedTAN step", "fedbn": "in training, FedBN"}

moments = pytest.mark.parametrize("method", HELD)


def fault(name: str, server_round: int, partition: int = 1, **exchange: int) -> dict[str, object]:
    return {"name": name, "partition": partition, "round": server_round, **exchange}


@pytest.mark.slow
def test_a_reply_with_200_megabytes_that_nobody_asked_for(
    faults: FaultyRuns, tmp_path: Path
) -> None:
    run = faults.submit([fault("large", 1)], rounds=2)
    assert run.completes("200 MB in a reply", 1, "named in the log, the site misses the round") == [
        1,
        2,
    ]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
@moments
def test_a_killed_clientapp(method: str, faults: FaultyRuns, tmp_path: Path) -> None:
    run = faults.submit([fault("hold", 2, **HELD[method])], method=method)
    kill([faults.await_held("south")])
    assert run.completes(f"ClientApp killed {MOMENT[method]}", 2, "the site misses the round") == [
        2,
        1,
        2,
    ]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*HELD, "fedbn"])
def test_a_killed_supernode(method: str, faults: FaultyRuns, tmp_path: Path) -> None:
    # the BN that FedBN's node has kept in round 1 survives, or the model would be another one
    run = faults.submit([fault("hold", 2, **HELD.get(method, {}))], method=method)
    faults.await_held("south")
    faults.federation.services["south-node"].kill()
    faults.release("south")
    nodes = run.completes(
        f"SuperNode killed {MOMENT[method]}",
        2,
        "the site misses the round, and comes back by itself",
    )
    assert nodes[:2] == [2, 1]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
@moments
def test_a_killed_superlink(method: str, faults: FaultyRuns, tmp_path: Path) -> None:
    # both: a SuperNode that is sending when the SuperLink dies starts anew, and misses what comes
    # meanwhile
    run = faults.submit(
        [fault("hold", 2, partition, **HELD[method]) for partition in (0, 1)], method=method
    )
    for site in SITES:
        faults.await_held(site)
    superlink = faults.federation.services["superlink"]
    starts = superlink.starts
    superlink.kill()
    await_that(lambda: superlink.starts > starts, "the SuperLink starts again")
    faults.federation.await_answer()
    for site in SITES:
        faults.release(site)
    nodes = run.completes(f"SuperLink killed {MOMENT[method]}", 2, "the run goes on where it was")
    assert nodes == [2, 2, 2]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
def test_a_site_that_stays_away(faults: FaultyRuns, tmp_path: Path) -> None:
    run = faults.submit([fault("hold", 2)])
    faults.await_held("south")
    faults.federation.services["south-node"].kill(stay_away=True)
    faults.release("south")
    outcome = "the others finish, with `min-nodes`"
    assert run.completes("a site goes away for good", 2, outcome) == [2, 1, 1]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
def test_a_site_that_stays_away_and_is_needed(faults: FaultyRuns, tmp_path: Path) -> None:
    run = faults.submit([fault("hold", 2)], min_nodes=2, node_timeout=5)
    faults.await_held("south")
    faults.federation.services["south-node"].kill(stay_away=True)
    faults.release("south")
    reason = run.fails("a site that is needed goes away for good (`node-timeout=5`)")
    assert re.fullmatch(r"1 of 2 nodes connected within 5 seconds: north \(node \d+\)", reason)
    assert run.summary()["rounds-done"] == 2
    run.assert_same_model(tmp_path)


@pytest.mark.slow
def test_a_late_site(faults: FaultyRuns, tmp_path: Path) -> None:
    federation = faults.federation
    federation.services["south-node"].kill(stay_away=True)
    federation.await_online(["north"])
    run = faults.submit([fault("hold", 2, partition=0)], node_timeout=5)
    faults.await_held("north")
    federation.services["south-node"].come_back()
    federation.await_online(["north", "south"])
    faults.release("north")
    assert run.completes("a site comes late", 3, "takes part from the next round on") == [1, 1, 2]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
def test_a_network_that_is_cut_for_longer_than_the_deadline(
    faults: FaultyRuns, tmp_path: Path
) -> None:
    run = faults.submit([fault("hold", 2), fault("hold", 3, partition=0)], rounds=4, timeout=40)
    faults.await_held("south")
    faults.federation.relays["south"].cut()
    faults.release("south")
    faults.await_held("north")  # of the next round
    faults.federation.relays["south"].mend()
    faults.release("north")
    outcome = "the site misses the round (`timeout=40`), and comes back by itself"
    nodes = run.completes("a site's network is cut for longer than the deadline", 2, outcome)
    assert nodes[:2] == [2, 1]
    run.assert_same_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ca.crt", "node.key"])
def test_a_site_that_may_not_take_part(name: str, faults: FaultyRuns, tmp_path: Path) -> None:
    shown = {"ca.crt": "wrong certificate", "node.key": "unregistered key"}[name]
    said = {"ca.crt": "CERTIFICATE_VERIFY_FAILED", "node.key": "Failed to activate SuperNode"}[name]
    federation = faults.federation
    file, node = federation.kit("south") / name, federation.services["south-node"]
    right = file.read_bytes()
    file.write_bytes(_foreign(name, tmp_path))
    try:
        before = node.text().count(said)
        node.kill()
        await_that(lambda: node.text().count(said) > before, f"the site's log says {said}")
        federation.await_online(["north"])
        run = faults.submit(node_timeout=5, rounds=1)
        assert run.completes(shown, 1, f"the site's log says it ({said}), the others finish") == [1]
    finally:
        file.write_bytes(right)


def _foreign(name: str, folder: Path) -> bytes:
    """Return a certificate of another federation, or a key that nobody has registered."""
    if name == "ca.crt":
        out = folder / "another"
        assert (
            fedbn_flwr(["provision", str(ROOT / "federation.example.yaml"), "--out", str(out)]) == 0
        )
        return (out / "ca" / "ca.crt").read_bytes()
    make_node_key(folder / "node.key", folder / "node.pub", "nobody")
    return (folder / "node.key").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("also_nodes", [False, True])
def test_a_run_whose_serverapp_was_killed_is_resumed(
    also_nodes: bool, faults: FaultyRuns, tmp_path: Path
) -> None:
    # north is held in the round after the one with the checkpoint, or in the next one, which south
    # has trained in
    method, held = ("scaffold", 3) if also_nodes else ("fedbn", 4)
    options: dict[str, Any] = {
        "method": method,
        "rounds": 5,
        "momentum": 0.5,
        "momentum_state": "local",
    }
    run = faults.submit([fault("hold", held, partition=0)], checkpoint_every=2, **options)
    process = faults.await_held("north")
    faults.await_states("south", run, held)
    kill_serverapp(faults.federation)
    if also_nodes:
        for site in ("north", "south"):
            faults.federation.services[f"{site}-node"].kill(stay_away=True)
        faults.federation.await_online([])
        for site in ("north", "south"):
            faults.federation.services[f"{site}-node"].come_back()
    kill([process])
    faults.release("north")
    faults.federation.await_online(["north", "south"])
    again = faults.submit(checkpoint_every=2, resume=run.number, **options)
    what = "ServerApp and both SuperNodes" if also_nodes else "ServerApp"
    assert again.completes(f"{what} killed, `resume`", 3, "goes on after its checkpoint") == [2] * 5
    run.assert_same_model(tmp_path)
    assert_same_results(again.folder, tmp_path)
