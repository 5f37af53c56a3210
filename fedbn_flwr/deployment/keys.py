"""Keys and certificates: a CA for the server's certificate, a node key for each site, shared
secrets.
"""

import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbn_flwr.deployment import DeploymentError, using

#: readable by their owner only, and by everybody
PRIVATE = 0o600
PUBLIC = 0o644
#: for containers of folders that root has made: services never run as root
_UNPRIVILEGED = 10001
#: years for which a CA is valid
CA_YEARS = 10
#: how far in the past a certificate's validity starts, for machines whose clocks are slow
_CLOCK_SLACK = timedelta(hours=1)


def write_new(path: Path, content: bytes | str, mode: int) -> None:
    """Write a file that is not there yet; its mode is set before its content."""
    if isinstance(content, str):
        content = content.encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise DeploymentError(f"{path} exists already, and is never overwritten") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)


def user_of(folder: Path) -> str:
    """Return USER:GROUP for containers that use a folder: its owner, or an unprivileged user if
    that is root.
    """
    status = folder.stat()
    return f"{status.st_uid or _UNPRIVILEGED}:{status.st_gid or _UNPRIVILEGED}"


def hand_over(folder: Path, user: str = "") -> None:
    """Give a file, or a folder with all in it, to the user USER:GROUP of the containers; only root
    can and needs to.
    """
    if os.geteuid() == 0:
        user = user or f"{_UNPRIVILEGED}:{_UNPRIVILEGED}"
        number, _, group = user.partition(":")
        if not (number.isdecimal() and group.isdecimal()):
            raise DeploymentError(f"FEDBN_USER must be two numbers, USER:GROUP, got {user!r}")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, int(number), int(group), follow_symlinks=False)


def make_ca(name: str, certificate: Path, key: Path) -> None:
    """Make a CA that signs server certificates and nothing else."""
    private = ec.generate_private_key(ec.SECP384R1())
    subject = _subject(f"{name} CA")
    builder = _builder(subject, subject, private.public_key(), timedelta(days=365 * CA_YEARS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
    write_new(key, _pem(private), PRIVATE)
    write_new(certificate, builder.sign(private, hashes.SHA384()).public_bytes(_PEM), PUBLIC)


def make_server_certificate(
    ca: Path, ca_key: Path, hosts: Sequence[str], days: int, folder: Path
) -> None:
    """Make `server.crt` and `server.key` for the given names and addresses."""
    with using(ca):
        issuer = x509.load_pem_x509_certificate(ca.read_bytes())
    with using(ca_key):
        signer = serialization.load_pem_private_key(ca_key.read_bytes(), password=None)
    is_its_key = signer.public_key() == issuer.public_key()
    if not is_its_key or not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise DeploymentError(f"{ca_key} is not the key of {ca}")
    private = ec.generate_private_key(ec.SECP384R1())
    builder = _builder(
        _subject(hosts[0]), issuer.subject, private.public_key(), timedelta(days=days)
    )
    names = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys(hosts)])
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_key_usage("digital_signature"), critical=True)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(authority, critical=False)
    write_new(folder / "server.key", _pem(private), PRIVATE)
    write_new(
        folder / "server.crt", builder.sign(signer, hashes.SHA384()).public_bytes(_PEM), PUBLIC
    )


def certificate_hosts(path: Path) -> set[str]:
    """Return the names and addresses that a certificate is for."""
    with using(path):
        extension = x509.load_pem_x509_certificate(path.read_bytes()).extensions
        names = extension.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def trusting(ca: Path) -> ssl.SSLContext:
    """Return a context for connections to a server whose certificate this CA has signed."""
    with using(ca):
        return ssl.create_default_context(cadata=ca.read_text())


def make_node_key(private: Path, public: Path, comment: str) -> None:
    """Make a key pair of the kind that Flower's node authentication takes, in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    none = serialization.NoEncryption()
    write_new(private, key.private_bytes(_PEM, form, none), PRIVATE)
    write_new(public, public_text(key) + f" {comment}\n", PUBLIC)


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key."""
    with suppress(ValueError, UnsupportedAlgorithm):
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    raise DeploymentError(f"{path} is not a private ECDSA key in OpenSSH's format")


def check_public_key(path: Path) -> None:
    """Refuse a file that is not a public key of the kind that nodes have."""
    with using(path):
        content = path.read_bytes()
    if b"PRIVATE KEY" in content:
        raise DeploymentError(
            f"{path} is a private key, which must not leave its site: give its public half (.pub)"
        )
    with suppress(ValueError, UnsupportedAlgorithm):
        if isinstance(serialization.load_ssh_public_key(content), ec.EllipticCurvePublicKey):
            return
    raise DeploymentError(f"{path} is not a public ECDSA key in OpenSSH's format")


def public_text(key: ec.EllipticCurvePrivateKey) -> str:
    """Return the public half as OpenSSH writes it, without a comment."""
    form = serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, form).decode()


_PEM = serialization.Encoding.PEM
#: what a key can be for
_USES = (
    "digital_signature",
    "key_cert_sign",
    "crl_sign",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _CLOCK_SLACK).not_valid_after(now + valid)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
