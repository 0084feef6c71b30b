"""Algorithms by name: in files, in --rules, swept, and refused where they do not go together with something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import Experiment, UserError
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.parts import federations_of
from steelyard.settings import validated

QUICK = {"rounds": {"count": 2}, "partition": {"clients": 4, "server": "fraction", "server_fraction": 0.1}}


def described(**sections: Any) -> Experiment:
    return validated(Experiment, {"model": {"name": "logistic"}, **QUICK, **sections}, "")


def test_words_name_algorithm_and_rule() -> None:
    found = with_rules(described(), ["DS,scaffold,fedprox(mu=0.5)+LD>DS/max,fedavg,fedavgm(beta=0.5)+guarded"])
    made = {f.name: (f.algorithm.name, f.rule.names) for f in federations_of(found)}
    assert made == {
        "DS": ("fedavg", ("DS",)),
        "scaffold": ("scaffold", ("DS",)),
        "fedprox(mu=0.5)+LD>DS/max": ("fedprox", ("LD", "DS")),
        "fedavg": ("fedavg", ("DS",)),
        "fedavgm(beta=0.5)+guarded": ("fedavgm", ("RD",)),
    }
    assert federations_of(found)[2].algorithm.pull == 0.5
    # The same document read again, as a run's folder holds it, gives the same federations.
    again = Experiment.model_validate(found.model_dump(mode="json", exclude_none=True))
    assert {f.name: (f.algorithm, f.rule.names) for f in federations_of(again)} == {
        f.name: (f.algorithm, f.rule.names) for f in federations_of(found)
    }


def test_rules_without_an_algorithm_take_the_experiments() -> None:
    found = with_rules(described(algorithm={"name": "fedprox", "mu": 0.2}), ["LD,fedavg,scaffold"])
    assert {f.name: f.algorithm.name for f in federations_of(found)} == {
        "fedprox(mu=0.2)+LD": "fedprox",
        "fedavg": "fedavg",
        "scaffold": "scaffold",
    }
    assert [f.algorithm.pull for f in federations_of(found)] == [0.2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"algorithm": {"name": "scafold"}},
            "algorithm.name: got 'scafold' (did you mean 'scaffold'?); allowed: apfl, client-momentum, ditto",
        ),
        ({"algorithm": {"name": "mine"}}, "; one of your own: name its file in plugins beside the name"),
        ({"algorithm": {"name": "fedprox", "nu": 1}}, "algorithm.nu: unknown field; allowed here: mu"),
        ({"algorithm": {"name": "fedprox", "mu": -1}}, "algorithm.mu: got -1; allowed: greater than or equal to 0"),
        (
            {"algorithm": {"name": "fednova"}, "training": {"optimiser": "adam"}},
            "training.optimiser: got 'adam', for which fednova is not defined; allowed: sgd",
        ),
        (
            {"algorithm": {"name": "fedexp"}, "weighing": {"defence": {"rule": "median"}}},
            "weighing.defence: got 'median' with fedexp, whose server needs single updates",
        ),
        (
            {"algorithm": {"name": "scaffold"}, "weighing": {"trained_by": "server"}},
            "algorithm.name: got 'scaffold' with weighing.trained_by = 'server', where no client trains",
        ),
        (
            {"algorithm": {"name": "scaffold"}, "privacy": {"aggregation": {"kind": "secure"}}},
            "privacy.aggregation: scaffold has clients send control_change beside their models",
        ),
        (
            {"algorithm": {"name": "fedrep"}, "privacy": {"aggregation": {"kind": "secure"}}},
            "privacy.aggregation: clients of fedrep keep the head of their models to themselves",
        ),
        (
            {"algorithm": {"name": "fednova"}, "privacy": {"aggregation": {"kind": "secure"}}},
            "privacy.aggregation: the server of fednova needs single updates, and here it has only their sum",
        ),
        (
            {"algorithm": {"name": "fednova"}, "privacy": {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"}},
            "privacy.local: the server of fednova counts the steps of each client, which devices with noise do not",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        described(**sections)
    assert line in str(refused.value)


def test_algorithms_that_need_the_sum_alone_go_with_robust_rules_and_hidden_sums() -> None:
    for name in ("fedprox", "feddyn", "fedavgm", "fedadam"):
        described(algorithm={"name": name}, weighing={"defence": {"rule": "median"}})
        described(algorithm={"name": name}, privacy={"aggregation": {"kind": "secure"}}, rounds={"fraction": 1.0})


def test_recommenders_take_no_algorithm(tmp_path: Path, refused: Any) -> None:
    taken = "".join(f"{user}\t{item}\t5\t{item}\n" for user in range(6) for item in range(8))
    (tmp_path / "taken.tsv").write_text(f"user\titem\trating\ttime\n{taken}")
    (tmp_path / "lists.toml").write_text('kind = "recommend"\n[interactions]\npath = "taken.tsv"\n')
    line = refused("show", "lists.toml", "--set", "algorithm.name=scaffold", "--resolved")
    assert "algorithm.name: got 'scaffold', but clients of this kind do not send whole models; allowed: fedavg" in line


OWN = """
from steelyard import Algorithm, ServerStep, algorithm


@algorithm("half-way")
class HalfWay(Algorithm):
    \"\"\"Goes a part of the way.\"\"\"

    part: float = 0.5

    def step(self, server: ServerStep):
        return server.parameters + self.part * server.change, {}
"""


def test_an_algorithm_of_ones_own(tmp_path: Path, steelyard: Any, refused: Any) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[rounds]\ncount = 2\n[model]\nname = "logistic"\n[partition]\nclients = 3\n'
        '[algorithm]\nname = "half-way"\npart = 0.25\nplugins = ["mine.py"]\n'
    )
    assert "names code of its own (algorithm.plugins" in refused("run", tmp_path / "mine.toml")
    done = steelyard("run", tmp_path / "mine.toml", "--trust", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "half-way" in done.stdout
    # Its run keeps the file, and goes on without the original.
    (tmp_path / "mine.py").unlink()
    assert (tmp_path / "run" / "code" / "mine.py").read_text() == OWN
    assert steelyard("resume", "run", "--trust").returncode == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def train(self, local): ...", "train is defined, and by_hand is False; allowed: both train and by_hand"),
        ("by_hand = True", "no train is defined, and by_hand is True"),
        ("def correction(self, received, kept): ...", "correction is defined, and corrects is 'nothing'"),
        ("def listen(self, heard): ...", "listen is defined, and listens is False"),
        ("def sent(self, local): ...", "sent is defined, and replaces is False"),
        ("def after_training(self, local): ...", "after_training is defined, and keeps and sends are empty"),
    ],
)
def test_a_method_that_nobody_would_ask_for_is_refused(body: str, says: str, tmp_path: Path, refused: Any) -> None:
    code = f"from steelyard import Algorithm, algorithm\n@algorithm('unasked')\nclass Unasked(Algorithm):\n    {body}\n"
    (tmp_path / "unasked.py").write_text(code)
    changes = ["algorithm.name=unasked", f"algorithm.plugins=['{tmp_path / 'unasked.py'}']"]
    line = refused("run", "quickstart", "--trust", *(word for each in changes for word in ("--set", each)))
    assert f"@algorithm('unasked'): {says}" in line


def test_a_parameter_is_swept(tmp_path: Path, steelyard: Any) -> None:
    pytest.importorskip("vl_convert", reason="figures need vl-convert-python")
    changes = ("--set", "rounds.count=1", "--set", "model.name=logistic", "--set", "algorithm.name=fedprox")
    done = steelyard("sweep", "quickstart", *changes, "--over", "algorithm.mu=0.01,1", "--out", "grid")
    assert done.returncode == 0, done.stderr
    assert 'name = "fedprox"' in (tmp_path / "grid" / "best.toml").read_text()


def test_the_algorithm_is_a_column_where_it_is_not_fedavg(tmp_path: Path, steelyard: Any) -> None:
    pytest.importorskip("vl_convert", reason="figures need vl-convert-python")
    changes = ("--set", "rounds.count=1", "--set", "model.name=logistic")
    done = steelyard("compare", "quickstart", *changes, "--rules", "DS,scaffold+LD", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "algorithm" in done.stdout
    document = json.loads(steelyard("table", "run", "--format", "json").stdout)
    assert document["algorithms"] == {"DS": "fedavg", "scaffold+LD": "scaffold"}
    report = steelyard("report", "run", "-o", "run.html")
    assert report.returncode == 0, report.stderr
    assert '<th scope="col">algorithm</th>' in (tmp_path / "run.html").read_text()
    plain = steelyard("compare", "quickstart", *changes, "--rules", "DS,LD", "--out", "plain")
    assert "algorithm" not in plain.stdout
