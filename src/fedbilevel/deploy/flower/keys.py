"""Certificates and keys for a secure deployment.

There is a certificate authority, a certificate for the server that it signs, and a key pair for
each client. Connections are encrypted with the certificate, and a SuperLink knows clients by their
keys. A private key is written before what is made from it, and every file at once or not at all: if
the process is killed, the next call makes what is missing.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbilevel.core import checks

# Names in the folder of keys.
CA = "ca.crt"
CA_KEY = "ca.key"
SERVER = "server.pem"
SERVER_KEY = "server.key"
CLIENTS = "clients"

MAX_DAYS = 36_500
MAX_CLIENTS = 100_000  # their keys take some minutes; more are a typing error
SOON = timedelta(days=30)  # a certificate that expires within this time is warned of
MAX_NAME_CHARS = 64  # of a common name in a certificate
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"  # of the name of a host
HOST_NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*")


def make(folder: Path, clients: int, hosts: Sequence[str], days: int = 365) -> list[Path]:
    """Write the certificates and keys that a folder does not hold yet.

    Existing files stay as they are, so that more clients, or a new certificate for the server, can
    be added under the same authority: whoever deletes `server.pem` gets a new one, and whoever
    deletes the keys of a client gets new ones, which revokes the old. Private keys are readable by
    their owner alone.

    Args:
        folder: Where to write; created if it does not exist.
        clients: The number of client keys that the folder should hold.
        hosts: Names and addresses under which clients reach the server. The certificate is also
            valid for `localhost` and 127.0.0.1, where a proxy and our own commands reach it.
        days: How long the server's certificate is valid; the authority lasts ten times as long.

    Returns:
        The files that were written.

    Raises:
        ValueError: A host is neither a name nor an address, a number is out of range, the authority
            ends before a certificate that it would sign, or a file is damaged.
        FileNotFoundError: The server's certificate is missing, and so is `ca.key`, which signs it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = make(Path(folder), clients=1, hosts=["fl.example.org"])
        >>> [path.name for path in written]
        ['ca.key', 'ca.crt', 'server.key', 'server.pem', 'client-0', 'client-0.pub']
    """
    checks.integer("clients", clients, least=0, most=MAX_CLIENTS)
    checks.integer("days", days, least=1, most=MAX_DAYS)
    for host in hosts:
        _check_host(host)
    (folder / CLIENTS).mkdir(parents=True, exist_ok=True)
    written = []
    if not (folder / CA).exists():
        written += _make_authority(folder, days)
    if not (folder / SERVER).exists() or not (folder / SERVER_KEY).exists():
        written += _make_server(folder, hosts, days)
    for number in range(clients):
        path = folder / CLIENTS / f"client-{number}"
        if not path.exists() or not path.with_suffix(".pub").exists():
            written += _make_client(path)
    return written


def expiry(path: Path) -> datetime:
    """Return when a certificate expires.

    Args:
        path: The certificate.

    Returns:
        The moment, in UTC.

    Raises:
        ValueError: The file is not a certificate.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = make(Path(folder), clients=0, hosts=["fl.example.org"], days=7)
        ...     (expiry(Path(folder, "server.pem")) - datetime.now(UTC)).days
        6
    """
    return _read_certificate(path).not_valid_after_utc


def check_server(folder: Path) -> None:
    """Check that the server's certificate is valid now, and warn if it expires soon.

    Args:
        folder: A folder that `make` has written.

    Raises:
        ValueError: The certificate, or that of the authority, has expired, or a file is damaged.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = make(Path(folder), clients=0, hosts=["fl.example.org"])
        ...     check_server(Path(folder))
    """
    now = datetime.now(UTC)
    for name in (CA, SERVER):
        ends = expiry(folder / name)
        if ends < now:
            raise ValueError(f"{folder / name} has expired on {ends:%Y-%m-%d}; {_RENEWAL[name]}")
        if ends < now + SOON:
            logging.getLogger("fedbilevel").warning(
                "%s expires on %s; %s", folder / name, f"{ends:%Y-%m-%d}", _RENEWAL[name]
            )


_RENEWAL = {
    SERVER: f"delete {SERVER} and {SERVER_KEY} and run `fedbilevel keys` again to renew it",
    CA: (
        f"delete {CA}, {CA_KEY}, {SERVER} and {SERVER_KEY}, run `fedbilevel keys` again, "
        f"and give every client the new {CA}; the keys of clients remain valid"
    ),
}


def _check_host(host: str) -> None:
    """Refuse what no certificate can hold, before anything is written."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return
    if not HOST_NAME.fullmatch(host) or len(host) > MAX_NAME_CHARS:
        raise ValueError(
            f"host is {host!r}; it must be an address, or a name of letters, digits, dots and "
            f"hyphens with at most {MAX_NAME_CHARS} characters"
        )


def _make_authority(folder: Path, days: int) -> list[Path]:
    written, key = _private_key(folder / CA_KEY, folder / CA)
    name = _common_name("fedbilevel authority")
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    # The authority outlives the server's certificate, which could not be renewed otherwise.
    certificate = (
        _certificate_builder(name, name, key.public_key(), 10 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    return [*written, _write(folder / CA, _certificate_pem(certificate))]


def _make_server(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    authority = _read_certificate(folder / CA)
    ends = authority.not_valid_after_utc
    if ends < datetime.now(UTC):
        raise ValueError(f"{folder / CA} has expired on {ends:%Y-%m-%d}; {_RENEWAL[CA]}")
    left = (ends - datetime.now(UTC)).days
    if days > left:
        raise ValueError(
            f"days is {days}; the authority in {folder / CA}, which signs the certificate, "
            f"ends in {left} days, on {ends:%Y-%m-%d}"
        )
    authority_key = _read_private(folder / CA_KEY)
    if authority_key.public_key() != authority.public_key():
        raise ValueError(f"{folder / CA_KEY} is not the key of {folder / CA}")
    written, key = _private_key(folder / SERVER_KEY, folder / SERVER)
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    alternatives = x509.SubjectAlternativeName([_general_name(host) for host in names])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _certificate_builder(_common_name(names[0]), authority.subject, key.public_key(), days)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    return [*written, _write(folder / SERVER, _certificate_pem(certificate))]


def _make_client(path: Path) -> list[Path]:
    """Write a key pair in OpenSSH format, the only one that Flower reads."""
    public = path.with_suffix(".pub")
    written, key = _private_key(path, public, serialization.PrivateFormat.OpenSSH)
    content = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return [*written, _write(public, content + b"\n")]


def _private_key(
    path: Path,
    public: Path,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> tuple[list[Path], ec.EllipticCurvePrivateKey]:
    """Return what was written, and the key in a file, which is made if it does not exist.

    What is public belongs to another key then, and is removed first.
    """
    if path.exists():
        return [], _read_private(path)
    public.unlink(missing_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return [_write(path, pem, private=True)], key


def _read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    content = path.read_bytes()
    read: Any = serialization.load_pem_private_key
    if b"OPENSSH" in content[:64]:
        read = serialization.load_ssh_private_key
    try:
        key = read(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is not a private key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is not a private key on an elliptic curve")
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a certificate") from error


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks of clients may be behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, content: bytes, private: bool = False) -> Path:
    """Write a new file, all of it or nothing; a private one is always its owner's alone."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    mode = 0o600 if private else 0o666
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path
