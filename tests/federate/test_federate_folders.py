"""App folders, certificates, keys, node configurations, and the command line around them."""

from __future__ import annotations

import subprocess
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
from tests.warm import warm_command, warm_script

from steelyard.clients.node import NodeConfig
from steelyard.data import load as load_data
from steelyard.data import share_out
from steelyard.errors import UserError
from steelyard.experiment.loading import build, load
from steelyard.federate.app_folder import write_app
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.run_config import experiment_of

ROOT = Path(__file__).parents[2]


def steelyard(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm_command(*arguments, folder=cwd or Path.cwd(), timeout=120)


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


def test_the_entries_of_an_app_are_flower_apps(tmp_path: Path):
    write_app(tmp_path, load("quickstart"))
    code = "from steelyard_app.client_app import app as c; from steelyard_app.server_app import app as s; print(c, s)"
    (tmp_path / "started.py").write_text(code)
    done = warm_script(tmp_path / "started.py", folder=tmp_path)
    assert "ClientApp" in done.stdout, done.stderr
    assert "ServerApp" in done.stdout


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    done = steelyard("federate", "init", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"steelyard: {tmp_path}: exists and is not empty; allowed: a new or an empty folder\n"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["federate", "local", "quickstart", "--nodes", "0"], "--nodes: got 0; allowed: 1 to 256"),
        (["federate", "local", "quickstart", "--nodes", "21"], "num-partitions: got 21; allowed: at most 20 clients"),
        (["federate", "local", "quickstat"], "did you mean 'quickstart'?"),
        (["federate", "init", "app", "quickstart", "--set", "federate.timeout=0"], "federate.timeout"),
        (["federate", "init", "app", "quickstart", "--set", "federate.node=2"], "federate.node: unknown field"),
        (["federate", "certificates", "tls", "--host", "no spaces"], "--host: got 'no spaces'"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path: Path, arguments: list[str], line: str):
    done = steelyard(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


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


def test_a_node_keeps_its_own_rows_only():
    experiment: Any = build({"data": {"source": "digits"}, "partition": {"scheme": "iid", "clients": 10}})
    config = NodeConfig.read({"partition-id": 3, "num-partitions": 5, "device-battery": 0.25})
    node = experiment.on_node(config)
    assert node.names == ("client-003", "client-008")
    assert node.about == {"features": [1, 8, 8], "classes": 10}
    kept_rows = node.clients.context.population(experiment.seed).source
    whole = share_out(load_data(experiment.data), experiment.partition, experiment.seed)
    mine = [whole.by_name[name] for name in node.names]
    assert len(kept_rows.dataset) == sum(len(rows.train) + len(rows.test) for rows in mine)
    kept = kept_rows.by_name["client-008"]
    np.testing.assert_array_equal(
        kept_rows.dataset.features[kept.train].numpy(), whole.dataset.features[mine[1].train].numpy()
    )
    assert config.facts(["client-003"]) == {"client-003": {"device": {"battery": 0.25}, "user": {}}}
