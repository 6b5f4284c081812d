"""Certificates and keys: who can read them, and what they are valid for."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from fedbilevel.deploy.flower import keys


def read_certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def is_private(path: Path) -> bool:
    return path.suffix == ".key" or (path.parent.name == "clients" and path.suffix != ".pub")


def test_private_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    written = keys.make(tmp_path, 2, ["fl.example.org"])
    assert len(written) == 8
    for path in written:
        owner_alone = path.stat().st_mode & 0o077 == 0
        assert owner_alone == is_private(path)


def test_the_authority_signs_the_server_and_outlives_it(tmp_path: Path) -> None:
    keys.make(tmp_path, 0, ["fl.example.org", "10.0.0.1"])
    authority = read_certificate(tmp_path / keys.CA)
    server = read_certificate(tmp_path / keys.SERVER)
    server.verify_directly_issued_by(authority)
    assert authority.not_valid_after_utc > server.not_valid_after_utc


def test_the_certificate_is_valid_for_the_hosts_and_for_a_proxy_beside_it(tmp_path: Path) -> None:
    keys.make(tmp_path, 0, ["fl.example.org", "10.0.0.1"])
    server = read_certificate(tmp_path / keys.SERVER)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert addresses == ["10.0.0.1", "127.0.0.1"]


def test_existing_keys_are_kept(tmp_path: Path) -> None:
    keys.make(tmp_path, 2, ["fl.example.org"])
    assert keys.make(tmp_path, 3, ["other"]) == [
        tmp_path / "clients/client-2",
        tmp_path / "clients/client-2.pub",
    ]


@pytest.mark.parametrize("host", ["", "a b", "é.org", "-a.org", "a..b", "a\x1b", "a" * 65, "*"])
def test_a_host_that_no_certificate_can_hold_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match=r"host is .*; it must be an address, or a name"):
        keys.make(tmp_path / "keys", 1, ["fl.example.org", host])
    assert not (tmp_path / "keys").exists()


def test_a_certificate_lasts_a_hundred_years_at_most(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", 0, ["*.example.org", "::1"], days=36_500)
    with pytest.raises(ValueError, match="days is 36501; it must be 1 to 36500"):
        keys.make(tmp_path / "more", 0, ["a.org"], days=36_501)
    assert not (tmp_path / "more").exists()
