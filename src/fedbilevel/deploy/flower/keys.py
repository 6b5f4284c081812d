"""What a small secure deployment needs: a certificate authority, the server's certificate, a key for every client."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA, CA_KEY, SERVER, SERVER_KEY, CLIENTS = "ca.crt", "ca.key", "server.pem", "server.key", "clients"


def make(folder: Path, clients: int, hosts: Sequence[str], days: int = 365) -> list[Path]:
    """Write what is not there yet: more clients or a new server certificate can be added to an old authority.

    The certificate is always for this machine too: a proxy, and our own commands, reach the SuperLink from there.
    """
    (folder / CLIENTS).mkdir(parents=True, exist_ok=True)
    made = []
    if not (folder / CA).exists():
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedbilevel authority")])
        usage = x509.KeyUsage(
            key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        lasts = 10 * days  # or nothing could be renewed when it must be
        authority = _certificate(name, name, key.public_key(), lasts).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        signed = authority.add_extension(usage, critical=True).sign(key, hashes.SHA384())
        made += [_private(folder / CA_KEY, _pem(key)), _public(folder / CA, _text(signed))]
    if not (folder / SERVER).exists():
        made += _server(folder, hosts, days)
    for number in range(clients):
        path = folder / CLIENTS / f"client-{number}"
        if not path.exists():
            own = ec.generate_private_key(ec.SECP384R1())
            form = (
                serialization.Encoding.PEM,
                serialization.PrivateFormat.OpenSSH,
                serialization.NoEncryption(),
            )
            shown = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            made += [
                _private(path, own.private_bytes(*form)),
                _public(path.with_suffix(".pub"), own.public_key().public_bytes(*shown) + b"\n"),
            ]
    return made


def _server(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    signer = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    names = dict.fromkeys([*hosts, "localhost", "127.0.0.1"])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, next(iter(names)))])
    certificate = (
        _certificate(name, authority.subject, key.public_key(), days)
        .add_extension(
            x509.SubjectAlternativeName([_alternative(host) for host in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
            critical=False,
        )
        .sign(signer, hashes.SHA384())
    )
    return [_private(folder / SERVER_KEY, _pem(key)), _public(folder / SERVER, _text(certificate))]


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return key.private_bytes(*form)


def _text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _public(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _private(path: Path, content: bytes) -> Path:
    """Readable by its owner only, from the first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path
