"""Runs under [privacy.records]: what is charged, what is written down, what leaves a client, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit import SMALL, assert_refused, changed

from steelyard.contributions.finding import contributions, without
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.learning.records import RecordNoise
from steelyard.learning.settings import TrainingSettings, batches
from steelyard.messages.updates import Task
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import FILE, Ledger
from steelyard.report.tables import privacy_lines
from steelyard.report.verification import verify
from steelyard.runs.history import History

TRAINING = {"learning_rate": 0.5, "epochs": 2, "batch_size": 32}
BASE = changed(
    SMALL,
    compute={"engine": "auto"},
    training=TRAINING,
    privacy={"records": {"clip": 1.0, "noise": 2.0}, "budget": {"delta": 1e-4}},
)


def described(**changes: Any) -> Description:
    return build(changed(BASE, **changes))


def test_each_client_is_charged_for_the_batches_that_it_takes(tmp_path: Path) -> None:
    rounds = {"count": 3, "fraction": 0.5}
    folder = run(described(rounds=rounds), out=tmp_path / "run")
    history = History(folder)
    clients = history.clients
    samples = dict(zip(clients["client"].tolist(), clients["samples"].tolist(), strict=True))
    taken = Counter(clients["client"].tolist())
    assert set(taken.values()) - {3}, "some client is left out in some round"
    expected: dict[str, float] = {}
    for name, count in taken.items():
        rate, steps = batches(int(samples[name]), TrainingSettings.model_validate(TRAINING))
        expected[name] = spent({Release(2.0, "poisson", rate): steps * count}, 1e-4)
    promise = history.facts.privacy
    assert promise is not None
    assert promise.clients == {"DS": pytest.approx(expected)}
    assert promise.epsilon == {"DS": pytest.approx(max(expected.values()))}
    assert history.rounds["epsilon"].iloc[-1] == pytest.approx(max(expected.values()), abs=1e-6)
    lines = privacy_lines(promise)
    assert "sample-level, with one sample of a client, or with one that adds nothing in its place" in lines[0]
    assert [charge.round for charge in Ledger(folder / FILE).charges] == sorted(np.repeat([1, 2, 3], 3))
    # Losses are told nobody; sizes count as known.
    assert np.isnan(clients["loss"].tolist()).all()
    assert verify(folder).verdict == "intact"


def test_every_client_spends_what_the_budget_allows_and_no_more(tmp_path: Path) -> None:
    privacy = {"records": {"clip": 1.0}, "budget": {"epsilon": 3.0, "delta": 1e-4}}
    folder = run(described(privacy=privacy), out=tmp_path / "run")
    promise = History(folder).facts.privacy
    assert promise is not None
    costs = list(promise.clients["DS"].values())
    assert len(costs) == 6
    assert min(costs) > 2.99
    assert max(costs) <= 3.0
    noises = {charge.release.noise for charge in Ledger(folder / FILE).charges}
    assert len(noises) > 1, "clients of other sizes need other noise"
    assert promise.noise == {"DS": max(noises)}
    # A run that is over has nothing left; one more round is one too many.
    resume(folder)
    assert len(Ledger(folder / FILE).charges) == 2 * len(noises)


def test_verify_names_batches_that_were_not_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain and an ε that are whole by themselves, of a ledger that lacks a step of each client."""
    assert verify(run(described(), out=tmp_path / "good")).found.changed == []
    release = RecordNoise.release

    def fewer(self: RecordNoise, samples: int) -> tuple[Release, int]:
        found, steps = release(self, samples)
        return found, steps - 1

    with monkeypatch.context() as patched:
        patched.setattr(RecordNoise, "release", fewer)
        folder = run(described(rounds={"count": 1}), out=tmp_path / "run")
    changes = verify(folder).found.changed
    assert [finding.round for finding in changes] == [1] * 6
    assert all(f"no line of {FILE} for" in finding.what for finding in changes)


def test_a_client_sends_its_size_and_no_loss_or_criterion(tmp_path: Path) -> None:
    privacy = {"records": {"clip": 1.0, "noise": 2.0}, "criteria": "charged", "criteria_noise": 50.0}
    clients, server = described(privacy=privacy, weighing={"criteria": ["DS", "LD"]}).assemble()
    names = tuple(clients.names(5))
    (answer,) = clients.train([Task("f", 5, 1, names, server.initial(5))])
    assert answer.samples.tolist() == answer.criteria["DS"].tolist() == list(clients.samples(5).values())
    assert answer.losses.tolist() == [0.0] * 6
    assert answer.first_losses is answer.label_counts is None
    # A deviation of 50 times 10 classes, cut to 0 … 10.
    assert set(answer.criteria["LD"]) & {0.0, 10.0}
    made = described(privacy=privacy, weighing={"criteria": ["DS", "LD"]}, rounds={"count": 1})
    charges = {each.what: each for each in Ledger(run(made, out=tmp_path / "run") / FILE).charges}
    assert charges["criteria"].release == Release(50.0)
    assert charges["criteria"].count == 1


@pytest.mark.parametrize("algorithm", ["scaffold", "fedprox", "fednova", "fedadam", "feddyn", "local-only"])
def test_algorithms_that_train_once_a_round_run(algorithm: str, tmp_path: Path) -> None:
    folder = run(described(algorithm={"name": algorithm}, rounds={"count": 1}), out=tmp_path / "run")
    assert np.isfinite(History(folder).rounds["accuracy"]).all()


def test_clients_with_much_noise_count_less(tmp_path: Path) -> None:
    """Inverse variances: of a client with T steps of noise z on batches of b samples, (b/zC)²/T."""
    privacy = {"records": {"clip": 0.5}, "budget": {"epsilon": 3.0, "delta": 1e-4}}
    made = described(privacy=privacy, weighing={"criteria": ["NP"]}, rounds={"count": 1})
    folder = run(made, out=tmp_path / "run")
    clients, charged = History(folder).clients, Ledger(folder / FILE).charges
    noise = {name: (each.release.noise, each.count) for each in charged for name in each.clients or ()}
    expected: dict[str, float] = {}
    for name, samples in zip(clients["client"].tolist(), clients["samples"].tolist(), strict=True):
        multiplier, steps = noise[name]
        expected[name] = (min(32, int(samples)) / (multiplier * 0.5)) ** 2 / steps
    weights = dict(zip(clients["client"].tolist(), clients["weight"].tolist(), strict=True))
    total = sum(expected.values())
    assert weights == pytest.approx({name: value / total for name, value in expected.items()})
    assert verify(folder).found.changed == []
    assert_refused(lambda: described(privacy=None, weighing={"criteria": ["NP"]}), "NP", "[privacy.records]")


def test_a_run_is_not_trained_again_for_what_its_clients_added(tmp_path: Path) -> None:
    server = {"partition": {**SMALL["partition"], "server": "fraction"}, "rounds": {"count": 1}}
    later = run(described(**server), out=tmp_path / "later")
    assert_refused(lambda: contributions(later), str(later), "ledger does not count")
    assert_refused(lambda: contributions(later, retrained=True), str(later), "ledger does not count")
    assert_refused(lambda: without(later, "client-000", retrained=True), str(later), "ledger does not count")
    # What the server reads of noisy updates while the run goes on costs nothing.
    found = contributions(run(described(**server, contributions={}), out=tmp_path / "now"))
    assert len(found["clients"]) == 6
    assert len(Ledger(tmp_path / "now" / FILE).charges) == len(Ledger(later / FILE).charges)


def test_hidden_updates_carry_it_too(tmp_path: Path) -> None:
    privacy = {**BASE["privacy"], "aggregation": {"kind": "secure"}}
    promise = History(run(described(privacy=privacy, rounds={"count": 1}), out=tmp_path / "run")).facts.privacy
    assert promise is not None
    assert len(promise.clients["DS"]) == 6


RECORDS = BASE["privacy"]["records"]


@pytest.mark.parametrize(
    ("field", "words", "changes"),
    [
        ("privacy.records", "given together with central", {"privacy": {"central": {"clip": 1.0, "noise": 1.0}}}),
        ("privacy.records", "given together with local", {"privacy": {"local": {"clip": 1.0, "noise": 1.0}}}),
        ("privacy.criteria", "tells LD of each client", {"weighing": {"criteria": ["LD"]}}),
        ("weighing.criteria", "how many samples of each class", {"weighing": {"criteria": ["KL"]}}),
        ("weighing.criteria", "losses before training", {"weighing": {"criteria": ["LB"]}}),
        (
            *("privacy.criteria_noise", "small batches"),
            {"privacy": {"criteria": "charged"}, "weighing": {"criteria": ["LD"]}},
        ),
        ("privacy.records", "takes its steps itself", {"algorithm": {"name": "apfl"}}),
        ("privacy.records", "takes its steps itself", {"algorithm": {"name": "fedrep"}, "model": {"name": "mlp"}}),
        ("privacy.records", "takes its steps itself", {"algorithm": {"name": "fedala"}}),
        ("privacy.records", "train a second time", {"algorithm": {"name": "ditto"}}),
        ("privacy.records", "once more before they test", {"algorithm": {"name": "fine-tuned"}}),
        ("privacy.records", "each other's models", {"algorithm": {"name": "fedfomo"}}),
        ("compute.engine", "'stacked'", {"compute": {"engine": "stacked"}}),
        ("flaws", "few-steps", {"flaws": [{"kind": "few-steps", "clients": ["client-000"], "amount": 0.5}]}),
    ],
)
def test_what_would_not_be_counted_is_refused(field: str, words: str, changes: dict[str, Any]) -> None:
    assert_refused(lambda: described(**changes), f"{field}: ", words, "allowed:")


def test_records_without_noise_and_budget_are_refused() -> None:
    assert_refused(lambda: described(privacy={"records": {"clip": 1.0}, "budget": {}}), "set privacy.records.noise or")


def test_a_delta_that_promises_nothing_to_a_sample_is_refused(tmp_path: Path) -> None:
    made = described(privacy={"records": RECORDS, "budget": {"delta": 0.01}})
    assert_refused(lambda: run(made, out=tmp_path / "run"), "privacy.budget.delta: ", 0.01, "samples")
    assert not (tmp_path / "run").exists()
