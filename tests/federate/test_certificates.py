"""Certificates that cannot serve are named before any process starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.ports import free_ports

from steelyard.errors import UserError
from steelyard.federate import certificates
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.node_link import Server
from steelyard.federate.processes import environment
from steelyard.federate.serving import ServerFolder


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
    ServerFolder(tmp_path / "server", tls).check()
    spoil(tls, other)
    with pytest.raises(UserError) as refused:
        ServerFolder(tmp_path / "server", tls).check()
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
        ServerFolder(tmp_path / "server", tmp_path / "tls").check()


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
        Server("127.0.0.1:1", tmp_path / "ca.pem", key).connection()
