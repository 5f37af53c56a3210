"""The containers' health check, and a SuperNode that ends instead of living on offline."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedbn_flwr.deployment import health
from fedbn_flwr.deployment.cli import main
from tests.helpers.checkout import ROOT, environment
from tests.helpers.tls_server import TLSServer
from tests.helpers.waiting import PATIENCE

#: longer than a test waits
FOREVER = 2 * PATIENCE

#: as the kernel writes it: a listener on 9094, a connection to 8443, one to 9094 that is only being
#: made
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:2386 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0
   1: 0100007F:B2C4 0500A8C0:20FB 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0
   2: 0100007F:B2C6 0500A8C0:2386 02 00000000:00000000 00:00000000 00000000     0        0 3 1 0
"""


def test_only_an_established_connection_to_the_remote_port_counts() -> None:
    assert health.connected(TABLE, 8443)
    assert not health.connected(TABLE, 9094)


def test_a_connection_of_this_machine_is_seen_and_its_end_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"there is no connection to port {port}"):
            health.check_health(f"connected {port}")
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        assert health.check_health(f"connected {port}") == f"connected to port {port}"
        server.close()
        client.close()
    with pytest.raises(ValueError, match="there is no connection"):
        health.check_health(f"connected {port}")


def test_an_answer_counts_only_with_a_certificate_of_the_federation(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert (
            main(
                ["provision", str(ROOT / "federation.example.yaml"), "--out", str(tmp_path / name)]
            )
            == 0
        )
    with TLSServer(tmp_path / "one" / "server", {"/health": b"{}"}) as server:
        url = f"https://127.0.0.1:{server.port}/health"
        assert (
            health.check_health(f"answers {url} {tmp_path / 'one/ca/ca.crt'}")
            == f"{url} answers 200"
        )
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            health.check_health(f"answers {url} {tmp_path / 'two/ca/ca.crt'}")
    with TLSServer(tmp_path / "one" / "server", {}, "key") as server:
        # the operator's door, which wants a key
        url = f"https://127.0.0.1:{server.port}/health"
        assert (
            health.check_health(f"answers {url} {tmp_path / 'one/ca/ca.crt'}")
            == f"{url} answers 401"
        )
    with pytest.raises(OSError, match="refused"):
        health.check_health(f"answers {url} {tmp_path / 'one/ca/ca.crt'}")


def test_the_exit_code_is_the_verdict() -> None:
    for wanted, code in (("", 0), ("connected 1", 1), ("perhaps", 1)):
        command = [sys.executable, "-m", "fedbn_flwr.deployment.health"]
        done = subprocess.run(
            command,
            env=environment(FEDBN_HEALTH=wanted),
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        ("return None", "the SuperNode has lost its loop"),
        (
            f"threading.Thread(target=lambda: 1 / 0).start(); time.sleep({FOREVER})",
            "a thread of the SuperNode has failed",
        ),
    ],
)
def test_a_supernode_that_can_no_longer_take_part_ends(failure: str, shown: str) -> None:
    # a thread that serves on is what keeps Flower's own process alive
    code = f"""import threading, time
from fedbn_flwr.deployment import supernode
def flower_supernode():
    threading.Thread(target=time.sleep, args=({FOREVER},)).start()
    {failure}
class Command:
    def load(self): return flower_supernode
supernode.entry_points = lambda **_: [Command()]
supernode.main()"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert shown in done.stderr
