"""Certificates and keys for a secure deployment.

There is a certificate authority, a certificate for the server that it signs, and a key pair for
each client. Connections are encrypted with the certificate, and a SuperLink knows clients by their
keys.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
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
MAX_NAME_CHARS = 64  # of a common name in a certificate
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"  # of the name of a host
HOST_NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*")


def make(folder: Path, clients: int, hosts: Sequence[str], days: int = 365) -> list[Path]:
    """Write the certificates and keys that a folder does not hold yet.

    Existing files stay as they are, so that more clients, or a new certificate for the server, can
    be added under the same authority. Private keys are readable by their owner alone.

    Args:
        folder: Where to write; created if it does not exist.
        clients: The number of client keys that the folder should hold.
        hosts: Names and addresses under which clients reach the server. The certificate is also
            valid for `localhost` and 127.0.0.1, where a proxy and our own commands reach it.
        days: How long the server's certificate is valid; the authority lasts ten times as long.

    Returns:
        The files that were written.

    Raises:
        ValueError: A host is neither a name nor an address, or `days` is out of range.
        FileNotFoundError: The server's certificate is missing, and so is `ca.key`, which signs it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = make(Path(folder), clients=1, hosts=["fl.example.org"])
        >>> [path.name for path in written]
        ['ca.key', 'ca.crt', 'server.key', 'server.pem', 'client-0', 'client-0.pub']
    """
    checks.integer("days", days, least=1, most=MAX_DAYS)
    for host in hosts:
        _check_host(host)
    (folder / CLIENTS).mkdir(parents=True, exist_ok=True)
    written = []
    if not (folder / CA).exists():
        written += _make_authority(folder, days)
    if not (folder / SERVER).exists():
        written += _make_server(folder, hosts, days)
    for number in range(clients):
        path = folder / CLIENTS / f"client-{number}"
        if not path.exists():
            written += _make_client(path)
    return written


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
    key = _new_key()
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
    return [
        _write_private(folder / CA_KEY, _key_pem(key)),
        _write_public(folder / CA, _certificate_pem(certificate)),
    ]


def _make_server(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    authority_key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = _new_key()
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
    return [
        _write_private(folder / SERVER_KEY, _key_pem(key)),
        _write_public(folder / SERVER, _certificate_pem(certificate)),
    ]


def _make_client(path: Path) -> list[Path]:
    """Write a key pair in OpenSSH format, the only one that Flower reads."""
    key = _new_key()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return [_write_private(path, private), _write_public(path.with_suffix(".pub"), public + b"\n")]


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


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


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_public(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _write_private(path: Path, content: bytes) -> Path:
    """Write a new file that only its owner can read, from the first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path
