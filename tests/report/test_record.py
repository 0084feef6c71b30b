"""The record to hand over says what a run knows of itself, and what it does not."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.made_run import make_run
from tests.runs.contents import change
from tests.runs.signed_runs import signed_run

from steelyard.cli.attack import outcomes_of
from steelyard.errors import UserError
from steelyard.experiment.comparing import load_comparison
from steelyard.report.documents.proof import Record, RecordedSite
from steelyard.report.record import attack_lines, record, rule_sentence, write_record
from steelyard.report.record_page import MOST_SITES, record_html
from steelyard.sweeps.attacking import Attack, attack_folder, run_attack


def test_a_record_names_sites_weights_hashes_and_what_is_not_known(tmp_path: Path) -> None:
    run = signed_run(tmp_path / "run", tmp_path / "keys")
    found = record(run, tmp_path / "keys")
    assert [(site["client"], site["rows"], site["rounds"], site["weight"]) for site in found["sites"]] == [
        ("a", 3, 3, 0.75),
        ("b", 1, 3, 0.25),
    ]
    assert found["verified"]["verdict"] == "whole"
    assert len(found["hashes"]["head after round 3"]) == 64
    assert found["purpose"].startswith("not said")
    assert found["attacks"] == ["none recorded"]
    assert not isinstance(found["contributions"], str)
    assert [(one["client"], one["verdict"]) for one in found["contributions"]["clients"]] == [
        ("a", "helps"),
        ("b", "not clear"),
    ]
    assert found["why"][0] == (
        "Clients are weighed by DS (dataset size: number of training samples), then LD (label diversity: number of "
        "distinct labels); each counts as far as those before it are met."
    )
    write_record(run, tmp_path / "record.json")
    assert json.loads((tmp_path / "record.json").read_text())["rule"] == "DS>LD"
    write_record(run, tmp_path / "record.html")
    page = (tmp_path / "record.html").read_text()
    assert found["hashes"]["head after round 3"] in page
    assert "<script" not in page
    values = found["contributions"]
    assert "a gain of" in page
    assert values["notes"]
    assert all(html.escape(note) in page for note in values["notes"]), "also that they are an order only"


def test_a_record_of_a_changed_run_names_what_was_changed(tmp_path: Path) -> None:
    run = signed_run(tmp_path / "run", tmp_path / "keys")
    change(run, "UPDATE failures SET reason = 'late' WHERE round = 2")
    (tmp_path / "keys" / "server.pub").unlink()
    found = record(run, tmp_path / "keys")["verified"]
    assert found["verdict"] == "CHANGED"
    assert found["changed"].startswith("round 2, client c: why it was left out")
    assert found["cannot be checked"].startswith("round 0: the server's signature of the head")


def test_values_that_were_not_measured_are_said_to_be_missing(tmp_path: Path) -> None:
    found = record(make_run(tmp_path / "run", rounds=3, clients=8, seeds=(1,)))
    assert found["contributions"] == "not measured in this run (`steelyard contributions`)"


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends with"):
        write_record(tmp_path, tmp_path / "record.pdf")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"criteria": ["EQ"]}, "Clients are weighed by EQ (equal say: 1 for every client)."),
        ({"criteria": ["own"]}, "Clients are weighed by own."),
        ({"trained_by": "server"}, "No client is weighed: the server trains on its own rows alone."),
        (
            {"criteria": ["own", "other"], "score": "product"},
            "Clients are weighed by own and other, joined by product.",
        ),
        (
            {"criteria": ["own"], "bound": 2.0, "max_weight": 0.5, "defence": {"rule": "median"}},
            "Clients are weighed by own; what a client says of itself is bounded; no weight passes a cap; updates are "
            "combined by median, against hostile clients.",
        ),
        ({"nonsense": 1}, "its settings are not of this version"),
    ],
)
def test_a_rule_is_said_in_words(settings: dict[str, object], words: str) -> None:
    assert rule_sentence(json.dumps(settings)) == words


def test_attacks_that_were_run_are_named_with_what_they_did(tmp_path: Path) -> None:
    described = load_comparison("quickstart", ["rounds.count=2"], ["fedavg", "EQ"])
    folder = attack_folder(Attack(described, ("sign-flip",), 0.2, 1), tmp_path / "attacked")
    with pytest.raises(UserError, match="clean is not done"):
        outcomes_of(folder)
    run_attack(folder)
    found = outcomes_of(folder)
    (line,) = attack_lines(found, "fedavg")
    accuracy = found["attacks"][1]["rules"][0]["accuracy"]["mean"]
    assert line.startswith(f"sign-flip, 20% of the clients hostile: accuracy {accuracy:.1%}, ")
    assert attack_lines(found, "DS>LD") == [
        "sign-flip, 20% of the clients hostile: tested under other rules only (fedavg, EQ)"
    ]


def crowded(document: Record, sites: int) -> Record:
    """Return a record with many sites, long words and many lines of everything."""
    site: RecordedSite = {
        "client": "hospital-of-the-city", "rows": 10, "labels": [9] * 62, "flaws": ["labels flipped in pairs (100%)"],
        "rounds": 5, "weight": 0.5,
    }  # fmt: skip
    return {
        **document,
        "sites": [site] * sites,
        "contributions": {
            "run": "", "rule": "", "seeds": [1], "measure": "loss", "unit": "loss", "method": "shapley",
            "source": "", "rounds": [1], "before": 1, "after": 0, "total": 1, "total_low": 0, "total_high": 2,
            "notes": ["a note of many words " * 6] * 6,
            "clients": [
                {"client": f"c{n}", "value": n, "low": 0, "high": 1, "verdict": "helps", "share": None, "rounds": 1,
                 "by_round": []} for n in range(sites)
            ],
        },
        "purpose": "words " * 500,
        "why": ["words " * 500] * 2,
        "beside": ["a rule"] * 300,
        "privacy": ["a line of privacy"] * 40,
        "attacks": ["an attack"] * 40,
        "notes": "a note; " * 500,
        "verified": {f"weights of rule {n}": "not computed again: it looks at updates" for n in range(40)},
    }  # fmt: skip


def test_long_lists_are_cut_on_the_page_and_say_how_many_more(tmp_path: Path) -> None:
    document = crowded(record(signed_run(tmp_path / "run", tmp_path / "keys")), 1000)
    page = record_html(document)
    assert f"and {1000 - MOST_SITES} more sites with {10 * (1000 - MOST_SITES)} training rows" in page
    assert page.count("hospital-of-the-city") == MOST_SITES
    assert "and 36 more" in page


def test_even_a_crowded_record_is_one_printed_page(tmp_path: Path, browser: Any) -> None:
    plain = record(signed_run(tmp_path / "run", tmp_path / "keys"))
    full: Record = {
        **plain, "purpose": "words " * 100, "why": ["words " * 40] * 2, "notes": "a note; " * 40,
        "privacy": ["a line of privacy"] * 4, "attacks": ["an attack"] * 4,
    }  # fmt: skip
    pages = [record_html({**full, "sites": plain["sites"] * number}) for number in range(1, 9)]
    roomy = [page for page in pages if 'class="roomy"' in page]
    assert 0 < len(roomy) < len(pages), "the last of them is the most that larger letters have room for"
    for content in (roomy[-1], record_html(crowded(plain, 1000))):
        page = browser.new_page()
        page.set_content(content)
        printed = page.pdf(prefer_css_page_size=True)
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
