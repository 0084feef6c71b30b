"""Every script of benchmarks/ starts and ends well in its smallest form: one that nobody starts rots."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from benchmarks.chain import signed
from tests.kit import named
from tests.warm import ROOT

from benchmarks import simulator
from steelyard.experiment.loading import load
from steelyard.studies.attack import under_attack

SMALLEST: dict[str, str] = {
    "cell_images": "--out out --seeds 1 --rounds 1 --images 100",
    "contributions": "--seeds 2 --rounds 2 --clients 3 --only two",
    "kernels": "--device cpu --tiny --out kernels.md",
    "large_models": "--megabytes 0.5 --clients 3 --rules MD>DS/max --here",
    "private_round": "out --models mlp --clients 10 --protections plain --seeds 1 --samples 20",
    "recbole": "ml.inter ratings.tsv",
    "walk": "csv --steps",
}
"""The arguments of a script's smallest work; _ stands for a space within an argument."""
SLOW: dict[str, str] = {
    "chain": "--bench C --rounds 12",
    "cold_start": "--out out --data yahoo --draws 1 --minutes 0",
    "faults steps": "steps --stride 40",
    "faults power": "power --stride 40",
    "faults full": "full --stride 40",
    "faults random": "random --count 10",
    "federation": "--nodes 2 --rounds 1 --served --out federation.md",
    "flower_fedavg": "--nodes 2 --rounds 1 --hidden 4",
    "data_check": "--rows 2000 --columns 6",
    "idle_nodes": "--nodes 1,3 --seconds 2 --out idle.md",
    "listed_users": "--neighbours 3",
    "secure_aggregation": "--parameters 200 --clients 3",
    "worth": "--seeds 2 --rounds 2 --only clean,_IID --rules EQ --engine loop --device cpu",
    "kgflex": "--recipe kgflex-yahoo --epochs 1",
    "knowledge": "--format json",
    "looking": "3 4",
    "processors": "--scenes clean --seeds 1",
    "published": "out --data mnist --splits IID --rules fedavg --tiny",
    "ranks": "--ranks 1,2 --bench C --clients 20 --rounds 2 --engine loop",
    "recommend": "--modes --rows 3000",
    "recommend_large": "--users 60 --items 50 --rows 1500 --epochs 2",
    "scale clients": "clients --registered 20,40 --cohorts 5,10 --rounds 4",
    "scale history": "history --rounds 3 --clients 4",
    "scale large": "large --parameters 10000 --clients 3 --rounds 2",
    "simulator nets": "--bench nets --networks lstm --clients 2 --steps 1 --engine loop",
    "simulator personal": "--bench personal --clients 2,2 --rounds 1 --algorithms fedbn,fedala --engine loop",
    "simulator loop": "--bench C --against loop --format json --rounds 1 --logs .",
    "startup": "--repeats 1",
    "server_kills": "--kills 1",
    "store": "3 4",
    "transfer": "--out out --seeds 1",
}
"""The same for scripts that take long even so; what follows a script's name tells its parts apart."""
STARTED = [
    *named((name, name, words) for name, words in SMALLEST.items()),
    *(pytest.param(name, words, id=name, marks=pytest.mark.slow) for name, words in SLOW.items()),
]
ELSEWHERE = {
    "guarded": "test_guarded_bench.py",
    "mutation": "by hand: it takes hours and needs mutmut",
    "recommend_tables": "test_chosen.py",
}
NEEDS = {
    "cold_start": "yahoo_movies",
    "kgflex": "yahoo_movies",
    "knowledge": "movielens_1m_dbpedia",
    "listed_users": "amazon_digital_music",
    "private_round": "mnist",
    "published": "mnist",
    "recommend": "movielens_1m",
    "transfer": "mnist",
}


def data_folder() -> Path:
    return Path(os.environ.get("STEELYARD_DATA", ROOT.parent / "shared" / "data"))


def start(name: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = NEEDS.get(name)
    if needed is not None and not (data_folder() / needed).is_dir():
        pytest.skip(f"{needed} is not in {data_folder()}")
    if name == "recbole":
        (folder / "ml.inter").write_text("user_id:token\titem_id:token\tgenres:token_seq\n1\t10\tcrime war\n")
    if name == "large_models":
        pytest.importorskip("nvflare")
    if name == "faults" and (shutil.which("cc") is None or not sys.platform.startswith("linux")):
        pytest.skip("needs cc and Linux")
    if name == "looking" and not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium")
    monkeypatch.setenv("STEELYARD_DATA", str(data_folder().resolve()))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")  # of processes that a script starts
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *(word.replace("_IID", " IID") for word in words.split())])
    # What another test has imported is read anew, as `python -m` does.
    for module in (f"benchmarks.{name}", f"benchmarks.{name}.__main__"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    code = None
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert code in (None, 0)
    if name == "recbole":
        assert (folder / "ratings.tsv").read_text() == "user_id\titem_id\tgenres\n1\t10\tcrime|war\n"


def test_every_script_is_started_somewhere() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    scripts |= {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert scripts == SMALLEST.keys() | {name.split()[0] for name in SLOW} | ELSEWHERE.keys()
    assert {path.name for path in (ROOT / "benchmarks").glob("*.sh")} == {
        "gpu.sh",
        "guarded.sh",  # by hand: it needs a machine with a GPU; test_guarded_bench.py holds what it starts
    }


def test_its_experiments_can_be_read() -> None:
    paths = {path.name: path for path in (ROOT / "benchmarks").glob("*.toml")}
    assert set(tomllib.loads(paths.pop("capacity.toml").read_text())) > {"DS", "LD", "MD"}
    found = {name: load(str(path)) for name, path in paths.items()}
    assert set(found) == {"attacks.toml", "patients.toml", "privacy.toml", "scores.toml"}
    assert under_attack(found["attacks.toml"], "alie+inflation", 0.2)
    assert list(found["privacy.toml"].beside) == ["fedavg", "LD>DS", "MD"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "words"), STARTED)
def test_it_starts(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(name.split()[0], words, tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_gpu_script_runs_on_the_processor(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(tmp_path), "tiny"]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"STEELYARD_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, (tmp_path / "gpu.log").read_text()
    assert ended.stdout.count('{"bench":') == 2


def test_ratios_are_the_peers_time_over_ours() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    def said(words: str, **seconds: list[float]) -> dict[str, Any]:
        peers = [simulator.Peer(name.replace("_", ":"), ended, None, {}, of, of) for name, of in seconds.items()]
        return simulator.summary(peers, simulator.parse(words.split()), {})

    found = said("--bench C --against loop", ours=[1.0, 2.0, 9.0], loop=[8.0, 6.0, 7.0])
    assert found["sec_per_round"] == {"ours": 2.0, "loop": 7.0}
    assert (found["ratio"], found["ratio_of_best"]) == ({"loop": 3.5}, {"loop": 6.0})


def test_in_a_signed_run_the_last_signature_of_each_node_stands_for_all() -> None:
    # Only the last ones are made by the nodes' keys: were one before them checked, it would be named as changed.
    assert signed(rounds=3, nodes=2)["signatures"] == 6
