"""App folders, certificates, keys, node configurations, and the command line around them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder
from cryptography.x509.verification import Store as Trusted

from steelyard.clients.place import Place
from steelyard.data import load as load_data
from steelyard.data import share_out
from steelyard.errors import UserError
from steelyard.experiment.loading import build, load
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.config import experiment_of
from steelyard.federate.scaffold import write_app

ROOT = Path(__file__).parents[2]


def steelyard(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "steelyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=120)


def test_an_app_folder_is_a_flower_app_with_the_experiment_in_it(tmp_path: Path):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    experiment = load("quickstart", ["rounds.count=3", 'description="say \\"hello\\"\\nthere"'])
    files = write_app(tmp_path / "app", experiment, address="server:8000")
    assert all(file.is_file() for file in files)
    config, warnings = load_and_validate(tmp_path / "app" / "pyproject.toml")
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["components"]["serverapp"] == "steelyard_app.server_app:app"
    run_config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert experiment_of(run_config) == experiment
    assert build_fab_from_disk(tmp_path / "app").startswith(b"PK")
    connection = tomllib.loads((tmp_path / "app" / ".flwr" / "config.toml").read_text())["superlink"]
    assert connection == {"default": "federation", "federation": {"address": "server:8000", "insecure": True}}
    assert load(tmp_path / "app" / "experiment.toml") == experiment


def test_the_entries_of_an_app_are_flower_apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_app(tmp_path, load("quickstart"))
    code = "from steelyard_app.client_app import app as c; from steelyard_app.server_app import app as s; print(c, s)"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert "ClientApp" in said.stdout, said.stderr
    assert "ServerApp" in said.stdout


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    said = steelyard("federate", "init", str(tmp_path))
    assert said.returncode == 2
    assert said.stderr == f"steelyard: {tmp_path}: exists and is not empty; allowed: a new or an empty folder\n"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["federate", "local", "quickstart", "--nodes", "0"], "--nodes: got 0; allowed: 1 or more"),
        (["federate", "local", "quickstart", "--nodes", "31"], "num-partitions: got 31; allowed: at most 30 clients"),
        (["federate", "local", "quickstat"], "did you mean 'quickstart'?"),
        (["federate", "init", "app", "quickstart", "--set", "federate.timeout=0"], "federate.timeout"),
        (["federate", "init", "app", "quickstart", "--set", "federate.node=2"], "federate.node: unknown field"),
        (["federate", "certificates", "tls", "--host", "no spaces"], "--host: got 'no spaces'"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path: Path, arguments: list[str], line: str):
    said = steelyard(*arguments, cwd=tmp_path)
    assert said.returncode == 2
    assert line in said.stderr
    assert "Traceback" not in said.stderr
    assert len(said.stderr.strip().splitlines()) == 1


def test_certificates_are_trusted_for_their_hosts_only(tmp_path: Path):
    made = make_certificates(tmp_path, ["server.example", "10.0.0.5"])
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    server = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    builder = PolicyBuilder().store(Trusted([authority]))
    for host in ("server.example", "localhost"):
        assert builder.build_server_verifier(x509.DNSName(host)).verify(server, [])
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "127.0.0.1"]
    with pytest.raises(x509.verification.VerificationError):
        builder.build_server_verifier(x509.DNSName("other.example")).verify(server, [])
    assert made.key.stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match="exists already"):
        make_certificates(tmp_path, ["server.example"])


def test_a_key_pair_is_what_flower_reads(tmp_path: Path):
    private, public = make_key(tmp_path / "node")
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == load_ssh_public_key(public.read_bytes())
    assert private.stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match="exists already"):
        make_key(tmp_path / "node")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "node config: got no clients; allowed: client="),
        ({"client": "a", "partition-id": 0, "num-partitions": 2}, "node config: got both names and a partition"),
        ({"client": "a", "clients": "b"}, "node config: got both client and clients"),
        ({"partition-id": 2, "num-partitions": 2}, "node config partition-id: got 2 of num-partitions 2"),
        ({"partition-id": 0}, "node config partition-id: got 0 of num-partitions None"),
        ({"partition-id": "0", "num-partitions": 2}, "node config partition-id: got '0'"),
        ({"klient": "a"}, "node config klient: unknown (did you mean 'client'?)"),
        ({"client": "a", "data": 3}, "node config data: got 3; allowed: a path in quotes"),
        ({"client": "a", "device-battery": "full"}, "node config device-battery: got 'full'; allowed: a number"),
    ],
)
def test_a_wrong_node_config_is_named(config: dict[str, Any], line: str):
    with pytest.raises(UserError) as caught:
        Place.read(config)
    assert str(caught.value).startswith(line)


def test_every_client_lives_on_exactly_one_node():
    names = [f"c{i:02d}" for i in range(11)]
    homes = [Place.read({"partition-id": i, "num-partitions": 4}).choose(names) for i in range(4)]
    assert sorted(name for home in homes for name in home) == names
    assert {len(home) for home in homes} == {2, 3}
    assert Place.read({"client": 7}).names == ("7",)
    assert Place.read({"clients": "b, a"}).choose(["a", "b", "c"]) == ("a", "b")
    with pytest.raises(UserError, match=r"no client 'c1'.*did you mean"):
        Place.read({"client": "c1"}).choose(names)


def test_a_node_keeps_its_own_rows_only():
    experiment: Any = build({"data": {"source": "digits"}, "partition": {"scheme": "iid", "clients": 10}})
    place = Place.read({"partition-id": 3, "num-partitions": 5, "device-battery": 0.25})
    hosted = experiment.on_node(place)
    assert hosted.names == ("client-003", "client-008")
    assert hosted.about == {"features": [1, 8, 8], "classes": 10}
    kept_rows = hosted.clients.context.population(experiment.seed).source
    whole = share_out(load_data(experiment.data), experiment.partition, experiment.seed)
    mine = [whole.by_name[name] for name in hosted.names]
    assert len(kept_rows.dataset) == sum(len(rows.train) + len(rows.test) for rows in mine)
    kept = kept_rows.by_name["client-008"]
    np.testing.assert_array_equal(
        kept_rows.dataset.features[kept.train].numpy(), whole.dataset.features[mine[1].train].numpy()
    )
    assert place.facts(["client-003"]) == {"client-003": {"device": {"battery": 0.25}, "user": {}}}
