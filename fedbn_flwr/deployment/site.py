"""The command of a site that makes its keys and secret."""

import os
from pathlib import Path

from fedbn_flwr.deployment import DeploymentError
from fedbn_flwr.deployment.keys import hand_over, make_node_key, make_secret, user_of

#: folders of a kit that the containers write to
WRITTEN = ("log", "state", "models")


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
    """Make the site's private key and secret, which stay here, and give what they need to the user of the containers.

    A key that is there stays. Returns the public half, which the operator needs.
    """
    env = read_env(kit)
    if "FEDBN_SITE" not in env:
        raise DeploymentError(f"{kit / '.env'} has no line FEDBN_SITE=...")
    site = env["FEDBN_SITE"]
    # Compose has read `.env` already when it runs this as the service `init`, and says which user it found
    user = os.environ.get("FEDBN_USER") or env.get("FEDBN_USER") or user_of(kit)
    if "FEDBN_USER" not in env:
        with (kit / ".env").open("a") as file:
            file.write(f"\n# who the containers run as; must be able to read the data\nFEDBN_USER={user}\n")
    public = kit / f"{site}.pub"
    if not (kit / "node.key").exists():
        public.unlink(missing_ok=True)  # the key that it belonged to is lost
        make_node_key(kit / "node.key", public, site)
    if not (kit / "superexec.secret").exists():
        make_secret(kit / "superexec.secret")
    for folder in (*WRITTEN, "code"):
        (kit / folder).mkdir(mode=0o700, exist_ok=True)
    for name in ("node.key", "superexec.secret", "code", *WRITTEN):
        hand_over(kit / name, user)
    return public
