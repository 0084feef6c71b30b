"""Pages that are made from the code and committed: `python -m tests.docs.test_result` writes them again."""

from __future__ import annotations

import json

import jsonschema
import pytest
from tests.docs.pages import ROOT, beside
from tests.report.made_run import make_run, shared_run

from steelyard.cli.printing import print_json
from steelyard.report.result import Comparison
from steelyard.result import Result

PAGE, RULES = (ROOT / "docs" / "reference" / name for name in ("result.md", "rules.md"))


def test_the_pages_are_those_made_from_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == beside("generated").result_page()
    assert RULES.read_text(encoding="utf-8") == beside("generated").rules_page()


def test_what_is_printed_has_the_form_of_the_page(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.loads(PAGE.read_text(encoding="utf-8").partition("```json")[2].partition("```")[0])
    untested = make_run(tmp_path_factory.mktemp("untested") / "run", rounds=0, clients=4, seeds=(1,), status="stopped")
    for folder in (shared_run(tmp_path_factory), untested):
        print_json(Result(folder).comparison)
        printed = json.loads(capsys.readouterr().out)
        jsonschema.validate(printed, schema)
        for wrong in ({"more": 1}, {"baseline": None}, {"rules": [{}]}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(printed | wrong, schema)
        assert Comparison.model_validate(Result(folder).comparison) == Result(folder).comparison


if __name__ == "__main__":
    PAGE.write_text(beside("generated").result_page(), encoding="utf-8")
    RULES.write_text(beside("generated").rules_page(), encoding="utf-8")
