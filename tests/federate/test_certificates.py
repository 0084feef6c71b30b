"""Certificates that cannot serve are named before any process starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from tests.ports import free_ports

from steelyard.errors import UserError
from steelyard.federate import certificates
from steelyard.federate.certificates import (
    check_certificates,
    days_left,
    make_certificates,
    make_key,
    renew_certificate,
)
from steelyard.federate.node_link import Server
from steelyard.federate.processes import environment


def _rubbish(name: str) -> Callable[[Path, Path], object]:
    return lambda folder, _: (folder / name).write_text("rubbish\n")


def _of_another(name: str) -> Callable[[Path, Path], object]:
    return lambda folder, other: shutil.copy(other / name, folder / name)


def _empty_certificate(folder: Path, _: Path) -> None:
    (folder / "server.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (_rubbish("server.pem"), "server.pem or server.key cannot be read"),
        (_empty_certificate, "server.pem or server.key cannot be read"),
        (_rubbish("server.key"), "server.pem or server.key cannot be read"),
        (_of_another("server.key"), "server.key is not the key of server.pem"),
        (_rubbish("ca.pem"), "ca.pem is not a certificate"),
        (_of_another("ca.pem"), "server.pem does not hold by ca.pem: "),
    ],
)
def test_a_certificate_that_cannot_serve_is_named(
    tmp_path: Path, spoil: Callable[[Path, Path], object], line: str
) -> None:
    tls, other = tmp_path / "tls", tmp_path / "other"
    make_certificates(tls, ["127.0.0.1"])
    make_certificates(other, ["127.0.0.1"])
    check_certificates(tls)
    spoil(tls, other)
    with pytest.raises(UserError) as refused:
        check_certificates(tls)
    assert str(refused.value).startswith(f"--tls: {tls}: {line}")
    assert "; allowed: a folder of `steelyard federate certificates`" in str(refused.value)


def test_a_certificate_that_has_run_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LongAgo(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) - timedelta(days=800)

    monkeypatch.setattr(certificates, "datetime", LongAgo)
    make_certificates(tmp_path / "tls", ["127.0.0.1"])
    with pytest.raises(UserError, match=r"server\.pem does not hold by ca\.pem: certificate has expired"):
        check_certificates(tmp_path / "tls")


def test_the_command_shows_no_frame_of_the_server(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ["127.0.0.1"])
    (tmp_path / "tls" / "server.pem").write_text("rubbish\n")
    command = [sys.executable, "-m", "steelyard", "federate", "serve", str(tmp_path / "server")]
    done = subprocess.run(
        [*command, "--tls", str(tmp_path / "tls"), "--listen", f"127.0.0.1:{free_ports(1)[0]}"],
        env=environment(tmp_path / "home"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("steelyard: --tls: ")
    assert "File " not in done.stderr
    assert "ssl.SSLError" not in done.stderr
    assert not (tmp_path / "server" / "superlink.log").exists()


@pytest.mark.parametrize("content", [b"rubbish\n", b"", b"\xff\xfe\x00"])
def test_a_node_names_a_ca_that_is_none(tmp_path: Path, content: bytes) -> None:
    key, _ = make_key(tmp_path / "node.key")
    (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(UserError, match=r"ca: .*ca\.pem is not a certificate; allowed: the server's ca\.pem"):
        Server("127.0.0.1:1", tmp_path / "ca.pem", key).connection(threading.Event())


def test_a_renewed_certificate_is_the_servers_by_the_file_that_nodes_have(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    made = make_certificates(tls, ["10.0.0.1", "server.example"])
    authority, before = made.authority.read_bytes(), made.certificate.read_bytes()
    assert 364 < days_left(tls) <= 365
    for file in (made.key, made.authority_key):
        assert (file.stat().st_mode & 0o777) == 0o600
    renew_certificate(tls)
    check_certificates(tls)
    assert made.authority.read_bytes() == authority
    assert made.certificate.read_bytes() != before
    renewed = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["10.0.0.1", "server.example", "127.0.0.1", "localhost"]
    assert (made.key.stat().st_mode & 0o777) == 0o600
    away = tmp_path / "ca.key"
    made.authority_key.rename(away)
    with pytest.raises(UserError, match=r"--renew: .*ca\.key cannot be read"):
        renew_certificate(tls)
    renew_certificate(tls, ["10.0.0.2"], away)
    check_certificates(tls)
    other = make_certificates(tmp_path / "other", ["10.0.0.1"])
    with pytest.raises(UserError, match=r"is not the key of .*ca\.pem"):
        renew_certificate(tls, authority_key=other.authority_key)
    away.write_text("rubbish")
    with pytest.raises(UserError, match="is not what `steelyard federate certificates` wrote"):
        renew_certificate(tls, authority_key=away)


def test_an_authority_outlives_the_certificates_that_it_signs(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls", ["127.0.0.1"])
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    assert authority.not_valid_after_utc - datetime.now(UTC) > timedelta(days=3000)
