"""Certificates, keys, app folders and node configurations, and the commands that make them."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder
from cryptography.x509.verification import Store as Trusted
from tests.kit import assert_refused

from steelyard.clients.node import NodeConfig
from steelyard.data import load as load_data
from steelyard.data import share_out
from steelyard.experiment.loading import build, load
from steelyard.federate.app_folder import experiment_of, write_app
from steelyard.federate.certificates import (
    check_certificates,
    days_left,
    make_certificates,
    make_key,
    renew_certificate,
)
from steelyard.federate.node import Server


def test_a_node_names_a_ca_that_is_none(tmp_path: Path) -> None:
    key, _ = make_key(tmp_path / "node.key")
    (tmp_path / "ca.pem").write_bytes(b"\xff\xfe\x00")
    server = Server("127.0.0.1:1", tmp_path / "ca.pem", key)
    assert_refused(lambda: server.connection(threading.Event()), "ca: ", "ca.pem is not a certificate")


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
    away = tmp_path / "ca.key"
    made.authority_key.rename(away)
    assert_refused(lambda: renew_certificate(tls), "--renew", "ca.key cannot be read")
    renew_certificate(tls, ["10.0.0.2"], away)
    check_certificates(tls)
    other = make_certificates(tmp_path / "other", ["10.0.0.1"])
    assert_refused(lambda: renew_certificate(tls, authority_key=other.authority_key), "is not the key of", "ca.pem")


def test_an_app_folder_is_a_flower_app_with_the_experiment_in_it(tmp_path: Path):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    experiment = load("quickstart", ["rounds.count=3", 'description="say \\"hello\\"\\nthere"'])
    write_app(tmp_path / "app", experiment, address="server:8000")
    config, warnings = load_and_validate(tmp_path / "app" / "pyproject.toml")
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["components"]["serverapp"] == "steelyard_app.server_app:app"
    run_config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert experiment_of(run_config) == experiment
    assert build_fab_from_disk(tmp_path / "app").startswith(b"PK")
    connection = tomllib.loads((tmp_path / "app" / ".flwr" / "config.toml").read_text())["superlink"]
    assert connection == {"default": "federation", "federation": {"address": "server:8000", "insecure": True}}
    assert load(tmp_path / "app" / "experiment.toml") == experiment


def test_certificates_are_trusted_for_their_hosts_only(tmp_path: Path):
    made = make_certificates(tmp_path, ["server.example", "10.0.0.5"])
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    server = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    builder = PolicyBuilder().store(Trusted([authority]))
    for host in ("server.example", "localhost"):
        assert builder.build_server_verifier(x509.DNSName(host)).verify(server, [])
    with pytest.raises(x509.verification.VerificationError):
        builder.build_server_verifier(x509.DNSName("other.example")).verify(server, [])
    assert_refused(lambda: make_certificates(tmp_path, ["server.example"]), "exists already")


def test_a_node_keeps_its_own_rows_only():
    experiment: Any = build({"data": {"source": "digits"}, "partition": {"scheme": "iid", "clients": 10}})
    config = NodeConfig.read({"partition-id": 3, "num-partitions": 5, "device-battery": 0.25})
    node = experiment.on_node(config)
    assert node.names == ("client-003", "client-008")
    assert node.about == {"features": [1, 8, 8], "classes": 10}
    kept = node.clients.context.population(experiment.seed).source
    whole = share_out(load_data(experiment.data), experiment.partition, experiment.seed)
    assert len(kept.dataset) == sum(len([*whole.by_name[name].train, *whole.by_name[name].test]) for name in node.names)
    mine, theirs = (source.by_name["client-008"].train for source in (kept, whole))
    np.testing.assert_array_equal(kept.dataset.features[mine].numpy(), whole.dataset.features[theirs].numpy())
    assert (config.device, config.user) == ({"battery": 0.25}, {})


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("server.pem", b"rubbish", "server.pem or server.key cannot be read"),
        ("server.key", None, "server.key is not the key of server.pem"),
        ("ca.pem", b"rubbish", "ca.pem is not a certificate"),
        ("ca.pem", None, "server.pem does not hold by ca.pem"),
    ],
)
def test_a_certificate_that_cannot_serve_is_named(tmp_path: Path, file: str, content: bytes | None, words: str) -> None:
    """Rubbish, or the file of another server."""
    make_certificates(tmp_path / "tls", ["127.0.0.1"])
    make_certificates(tmp_path / "other", ["127.0.0.1"])
    check_certificates(tmp_path / "tls")
    (tmp_path / "tls" / file).write_bytes(content or (tmp_path / "other" / file).read_bytes())
    assert_refused(lambda: check_certificates(tmp_path / "tls"), f"--tls: {tmp_path / 'tls'}", words)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("local quickstart --nodes 0", ("--nodes", "0", "1 to 256")),
        ("init app quickstart --set federate.node=2", ("federate.node", "unknown field")),
        ("init .", ("exists and is not empty",)),
        ("certificates tls --host no+spaces", ("--host", "'no+spaces'")),
    ],
)
def test_a_mistake_is_one_line(refused: Callable[..., str], tmp_path: Path, words: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    line = refused("federate", *words.split())
    assert [part for part in parts if part not in line] == []
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
