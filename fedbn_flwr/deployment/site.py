"""The commands of a site: make its key and secret, and later new ones."""

from pathlib import Path

from fedbn_flwr.deployment.errors import DeploymentError
from fedbn_flwr.deployment.keys import make_node_key, make_secret, set_aside
from fedbn_flwr.deployment.provision import hand_over, user_of


def read_env(kit: Path) -> dict[str, str]:
    """Read the kit's `.env`."""
    path = kit / ".env"
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise DeploymentError(f"{path} cannot be read ({error.strerror}): is {kit} the kit of a site?") from error
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith("#") and "=" in line]
    return dict(pairs)


def init_site(kit: Path) -> Path:
    """Make the site's private key and secret, which stay here; returns the public half, which the operator needs."""
    site = _name(kit)
    if (kit / "node.key").exists():
        raise DeploymentError(f"{kit / 'node.key'} exists already: `fedbn-flwr site renew {kit}` makes a new one")
    public = _make_key(kit, site)
    if not (kit / "superexec.secret").exists():
        make_secret(kit / "superexec.secret")
        hand_over(kit / "superexec.secret")
    with (kit / ".env").open("a") as file:
        file.write(f"\n# who the containers run as: the owner of this kit\nFEDBN_USER={user_of(kit)}\n")
    return public


def renew_site(kit: Path) -> tuple[Path, Path]:
    """Make a new key and set the old one aside; returns the new public half and the old private key."""
    site = _name(kit)
    if not (kit / "node.key").exists():
        raise DeploymentError(f"{kit} has no key yet: `fedbn-flwr site init {kit}` makes one")
    old = set_aside(kit / "node.key")
    set_aside(kit / f"{site}.pub")
    return _make_key(kit, site), old


def _make_key(kit: Path, site: str) -> Path:
    public = kit / f"{site}.pub"
    make_node_key(kit / "node.key", public, site)
    hand_over(kit / "node.key", public)
    return public


def _name(kit: Path) -> str:
    try:
        return read_env(kit)["FEDBN_SITE"]
    except KeyError:
        raise DeploymentError(f"{kit / '.env'} has no line FEDBN_SITE=...") from None
