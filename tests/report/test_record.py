"""The record to hand over says what a run knows of itself, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs.signed_runs import signed_run

from steelyard.errors import UserError
from steelyard.report.record import record, write_record


def test_a_record_names_sites_weights_hashes_and_what_is_not_known(tmp_path: Path) -> None:
    run = signed_run(tmp_path / "run", tmp_path / "keys")
    found = record(run, tmp_path / "keys")
    assert [(site["client"], site["rows"], site["rounds"], site["weight"]) for site in found["sites"]] == [
        ("a", 3, 3, 0.75),
        ("b", 1, 3, 0.25),
    ]
    assert found["verified"]["verdict"] == "whole"
    assert len(found["hashes"]["head"]) == 64
    assert found["purpose"].startswith("not said")
    write_record(run, tmp_path / "record.json")
    assert json.loads((tmp_path / "record.json").read_text())["rule"]["name"] == "DS>LD"
    write_record(run, tmp_path / "record.html")
    page = (tmp_path / "record.html").read_text()
    assert found["hashes"]["head"] in page
    assert "<script" not in page


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends with"):
        write_record(tmp_path, tmp_path / "record.pdf")
