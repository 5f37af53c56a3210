"""The operator's commands: register and revoke sites, look at a federation, fetch results.

The folder `operator/` is the home of Flower's own command, too: `FLWR_HOME=federation/operator flwr
run . --stream`.
"""

import base64
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from fedbn_flwr.deployment import DeploymentError, read_text, using
from fedbn_flwr.deployment.federation import check_name
from fedbn_flwr.deployment.keys import PRIVATE, check_public_key, trusting
from fedbn_flwr.whole_files import write_bytes

#: seconds to wait for the server, and for Flower's command
PATIENCE = 30.0
COMMAND_PATIENCE = 120.0
#: how many runs `status` shows
RUNS = 10
_NO_PROXY = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


class Operator:
    """The operator's folder, and what can be asked of the server with it."""

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        path = self.home / "config.toml"
        advice = f": is {home} an operator's folder?"
        text = read_text(path, advice)
        # Flower wants an absolute path, and the folder may have moved since
        here = re.sub(
            r'(?m)^root-certificates = ".*"$', f'root-certificates = "{self.home / "ca.crt"}"', text
        )
        if here != text:
            write_bytes(path, here.encode())
        with using(path, advice):
            links = tomllib.loads(here)["superlink"]
            self.name: str = links["default"]
            self.address: str = links[self.name]["address"]
        advice = "; `fedbn-flwr provision` makes one, and what the server needs"
        self._key = read_text(self.home / "operator.key", advice).strip()
        self._write_credentials()
        context = trusting(self.home / "ca.crt")
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        self._opener.addheaders = [("Authorization", f"Bearer {self._key}")]

    def register(self, key: Path) -> str:
        """Register a site's public key under the name of its file; returns the node's number."""
        check_public_key(key)
        sites = self.sites()
        name = key.stem
        check_name("site", name)
        if name in sites:
            raise DeploymentError(
                f"site {name!r} is registered already: `fedbn-flwr site revoke` it first"
            )
        node = str(
            self.flower("supernode", "register", str(key.resolve()), self.name, "--name", name)[
                "node-id"
            ]
        )
        self._note({**sites, name: node})
        return node

    def revoke(self, name: str) -> str:
        """Shut a site out: its key is not accepted any more. Returns the node's number."""
        sites = self.sites()
        if name not in sites:
            raise DeploymentError(
                f"no site {name!r} is registered; there are: {', '.join(sites) or 'none'}"
            )
        self.flower("supernode", "unregister", sites[name], self.name)
        node = sites.pop(name)
        self._note({**sites, f"{name} (revoked, {node[-4:]})": node})
        return node

    def sites(self) -> dict[str, str]:
        """Return the sites' names with their nodes' numbers.

        Revoked ones have names that no site can have.
        """
        path = self.home / "sites.json"
        if not path.exists():
            return {}
        with using(path):
            return dict(json.loads(path.read_text()))

    def nodes(self) -> list[dict[str, Any]]:
        """Return what the SuperLink knows of each node that is registered."""
        return list(self.flower("supernode", "list", self.name)["nodes"])

    def runs(self) -> list[dict[str, Any]]:
        """Return what the SuperLink knows of each run, the newest first."""
        return list(self.flower("list", self.name)["runs"])

    def flower(self, *words: str) -> dict[str, Any]:
        """Run Flower's command, whose script need not lie beside the interpreter, and return its
        JSON.
        """
        environment = {
            **os.environ,
            **_NO_PROXY,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        environment["FLWR_DISABLE_UPDATE_CHECK"] = "1"
        command = [sys.executable, "-P", "-m", "flwr.cli.app", *words, "--format", "json"]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=COMMAND_PATIENCE,
            )
            answer = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise DeploymentError(
                f"`flwr {words[0]}` at {self.address} gave no answer: {error}"
            ) from error
        if not answer.get("success"):
            reason = " ".join(str(answer.get("error-message", done.stderr)).split())
            raise DeploymentError(f"`flwr {' '.join(words[:2])}` at {self.address}: {reason}")
        return dict(answer)

    def result(self, path: str) -> bytes | None:
        """Return a file of the results, or None if it is not there; of a folder, its list as
        JSON.
        """
        try:
            with self._opener.open(
                f"https://{self.address}/results/{path}", timeout=PATIENCE
            ) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise DeploymentError(
                f"https://{self.address}/results/{path}: {error.reason}"
            ) from error
        except OSError as error:
            raise DeploymentError(f"https://{self.address} cannot be reached: {error}") from error

    def fetch(self, run: str, out: Path) -> list[Path]:
        """Copy the results of a run into a folder of its name; returns the files."""
        listed = None
        if run.isdecimal():
            listed = self._listed(f"{run}/")
        if listed is None:
            raise DeploymentError(
                f"there are no results of run {run!r}; there are: {', '.join(self._results())}"
            )
        files = [entry["name"] for entry in listed if entry["type"] == "file"]
        (out / run).mkdir(parents=True, exist_ok=True)
        return [
            self._copy(run, Path(name).name, out / run)
            for name in files
            if not name.endswith(".partial")
        ]

    def progress(self, run: str) -> dict[str, Any]:
        """Return a run's method, its rounds so far and in all, and its last row.

        A run without results, or with damaged ones, has none of these.
        """
        config = self.result(f"{run}/config.json")
        rounds = self.result(f"{run}/rounds.jsonl")
        if config is None or rounds is None:
            return {}
        try:
            options: Mapping[str, Any] = json.loads(config)["options"]
            rows = [json.loads(line) for line in rounds.splitlines() if line.endswith(b"}")]
            return {
                "method": options["method"],
                "rounds": options["rounds"],
                "done": len(rows),
                "last": (rows or [{}])[-1],
            }
        except (ValueError, LookupError, TypeError):
            return {}

    def _write_credentials(self) -> None:
        """Let Flower's own command send the operator's key to the address that its configuration
        names.
        """
        values = {
            "authn-type": "oidc",
            "oidc-access-token": self._key,
            "oidc-refresh-token": "none",
        }
        lines = [
            f"flower.account-auth.{self.address}.{name}: "
            f"{base64.b64encode(value.encode()).decode()}\n"
            for name, value in values.items()
        ]
        path = self.home / "credentials.yaml"
        path.touch(PRIVATE)
        text = "".join(lines)
        if path.read_bytes() != text.encode():
            path.write_text(text)

    def _results(self) -> list[str]:
        listed = self._listed("") or []
        return sorted(entry["name"] for entry in listed if entry["type"] == "directory") or ["none"]

    def _listed(self, folder: str) -> list[dict[str, Any]] | None:
        """Return what is in a folder of the results; None if it is not there."""
        answer = self.result(folder)
        if answer is None:
            return None
        with using(Path("results", folder), f", as https://{self.address} shows it"):
            return list(json.loads(answer))

    def _copy(self, run: str, name: str, folder: Path) -> Path:
        content = self.result(f"{run}/{name}")
        if content is None:
            raise DeploymentError(f"{name} of run {run} has gone")
        write_bytes(folder / name, content)
        return folder / name

    def _note(self, sites: Mapping[str, str]) -> None:
        text = json.dumps(sites, indent=2) + "\n"
        write_bytes(self.home / "sites.json", text.encode(), durable=True)


def overview(operator: Operator) -> Iterator[str]:
    """Yield the lines: a site each, then a run each, the newest first."""
    changed = {"online": "online-at", "offline": "offline-at", "unregistered": "deleted-at"}
    nodes = {str(node["node-id"]): node for node in operator.nodes()}
    yield f"{'site':<20} {'node':<20} {'state':<14} since"
    for site, number in sorted(operator.sites().items()):
        node = nodes.get(number, {"status": "unknown to the server"})
        since = node.get(changed.get(node["status"], "created-at"), "")
        yield f"{site:<20} {number:<20} {node['status']:<14} {since}"
    yield ""
    yield f"{'run':<20} {'state':<24} {'method':<16} {'rounds':<9} last round"
    for run in operator.runs()[:RUNS]:
        yield _run(run, operator.progress(str(run["run-id"])))
        why = str(run.get("status-details", "N/A")).removeprefix(
            "ServerApp failed with exception: "
        )
        times = f"from {run.get('pending-at', 'N/A')} to {run.get('finished-at', 'N/A')}"
        line = f"{'':<20} {times.removesuffix(' to N/A')}"
        yield line if why == "N/A" else f"{line}: {why}"


def _run(run: dict[str, Any], progress: dict[str, Any]) -> str:
    state = f"{run['run-id']!s:<20} {run['status']!s:<24}"
    if not progress:
        return state.rstrip()
    last = progress["last"]
    numbers = {
        key: last[key] for key in ("nodes", "train-loss", "accuracy") if last.get(key) is not None
    }
    shown = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
    if "left-out" in last:
        shown += f", without {', '.join(map(str, last['left-out']))}"
    done = f"{progress['done']}/{progress['rounds']:<7}"
    return f"{state} {progress['method']:<16} {done} {shown}".rstrip()
