"""Certificates and keys: who can read them, and what they are valid for."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedbilevel.deploy.flower import keys
from tests.support.tool import assert_refused, contents, invoke


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


def let_days_pass(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=days)

    monkeypatch.setattr(keys, "datetime", Later)


def assert_fits(folder: Path, clients: int) -> None:
    """Assert that every certificate and public key belongs to its private key."""
    for name, private in ((keys.CA, keys.CA_KEY), (keys.SERVER, keys.SERVER_KEY)):
        key = serialization.load_pem_private_key((folder / private).read_bytes(), None)
        assert read_certificate(folder / name).public_key() == key.public_key()
    read_certificate(folder / keys.SERVER).verify_directly_issued_by(
        read_certificate(folder / keys.CA)
    )
    for number in range(clients):
        path = folder / "clients" / f"client-{number}"
        private_key = serialization.load_ssh_private_key(path.read_bytes(), None)
        public = serialization.load_ssh_public_key(path.with_suffix(".pub").read_bytes())
        assert public == private_key.public_key()
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("written", range(7))
@pytest.mark.parametrize("renewal", [False, True])
def test_what_a_kill_has_left_out_is_made_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, renewal: bool
) -> None:
    if renewal:  # the private keys were deleted, what is public was forgotten
        keys.make(tmp_path, 1, ["a.org"])
        (tmp_path / keys.SERVER_KEY).unlink()
        (tmp_path / "clients" / "client-0").unlink()
    rename = os.replace
    renamed: list[object] = []

    def replace(source: Path, target: Path) -> None:
        if len(renamed) == written:
            raise KeyboardInterrupt
        renamed.append(target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        if written < (4 if renewal else 6):
            with pytest.raises(KeyboardInterrupt):
                keys.make(tmp_path, 1, ["a.org"])
        else:
            keys.make(tmp_path, 1, ["a.org"])
    keys.make(tmp_path, 1, ["a.org"])
    assert_fits(tmp_path, clients=1)
    assert not list(tmp_path.rglob("*.new"))


def test_a_deleted_key_is_replaced_by_another_one(tmp_path: Path) -> None:
    keys.make(tmp_path, 2, ["a.org"])
    before = contents(tmp_path)
    for name in ("client-1", "client-1.pub"):
        (tmp_path / "clients" / name).unlink()
    keys.make(tmp_path, 2, ["a.org"])
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {
        "clients/client-1",
        "clients/client-1.pub",
    }
    assert_fits(tmp_path, clients=2)


def test_an_expired_authority_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make(tmp_path, 1, ["a.org"], days=10)
    for name in (keys.SERVER, keys.SERVER_KEY):
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    let_days_pass(monkeypatch, 101)
    with pytest.raises(ValueError, match=r"ca.crt has expired on .*; delete ca.crt, ca.key"):
        keys.make(tmp_path, 1, ["a.org"], days=10)
    let_days_pass(monkeypatch, 95)
    with pytest.raises(ValueError, match=r"days is 10; the authority in .* ends in [45] days"):
        keys.make(tmp_path, 1, ["a.org"], days=10)
    assert contents(tmp_path) == before
    keys.make(tmp_path, 1, ["a.org"], days=3)
    client = (tmp_path / "clients" / "client-0").read_bytes()
    for name in (keys.CA, keys.CA_KEY, keys.SERVER, keys.SERVER_KEY):  # as the message says
        (tmp_path / name).unlink()
    keys.make(tmp_path, 1, ["a.org"])
    assert_fits(tmp_path, clients=1)
    assert (tmp_path / "clients" / "client-0").read_bytes() == client


def test_a_server_does_not_start_with_an_expired_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys.make(tmp_path, 0, ["a.org"], days=100)
    keys.check_server(tmp_path)
    assert not caplog.messages
    let_days_pass(monkeypatch, 80)
    keys.check_server(tmp_path)
    (message,) = caplog.messages
    assert "server.pem expires on" in message
    let_days_pass(monkeypatch, 101)
    with pytest.raises(ValueError, match=r"server.pem has expired on .*; delete server.pem"):
        keys.check_server(tmp_path)


@pytest.mark.parametrize(
    "name", ["ca.crt", "ca.key", "server.pem", "server.key", "clients/client-0"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    keys.make(tmp_path, 1, ["a.org"])
    lost = {"server.key": "server.pem", "clients/client-0": "clients/client-0.pub"}
    (tmp_path / lost.get(name, "server.pem")).unlink()
    (tmp_path / name).write_bytes(b"-----BEGIN")
    if name == "server.pem":
        with pytest.raises(ValueError, match=r"server.pem is not a certificate"):
            keys.check_server(tmp_path)
        return
    assert_refused(invoke("keys", tmp_path, "--clients", 1), str(tmp_path / name))


def test_the_command_prints_what_it_has_written_and_until_when(tmp_path: Path) -> None:
    outcome = invoke("keys", tmp_path / "keys", "--clients", 1, "--days", 30)
    assert outcome.code == 0
    ends = datetime.now(UTC) + timedelta(days=30)
    dated = [line for line in outcome.out.splitlines() if "valid until" in line]
    assert len(dated) == 2
    assert dated[1].endswith(f"server.pem (valid until {ends:%Y-%m-%d})")
    assert invoke("keys", tmp_path / "keys", "--clients", 1) == (0, "", "")


@pytest.mark.parametrize("clients", [-1, 100_001, 2**63, 10**30])
def test_a_number_of_clients_that_cannot_be_meant_is_refused(tmp_path: Path, clients: int) -> None:
    with pytest.raises(ValueError, match=f"clients is {clients}; it must be 0 to 100000"):
        keys.make(tmp_path / "keys", clients, ["a.org"])
    assert not (tmp_path / "keys").exists()
