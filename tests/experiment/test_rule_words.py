"""Words of --rules that say too little or too much are named in one line."""

from __future__ import annotations

import pytest

from steelyard.errors import UserError
from steelyard.experiment.loading import load
from steelyard.experiment.rule_words import parse_rules


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("fitted()", "a rule inside"),
        ("fitted(fitted(DS))", "not fitted"),
        ("server-only/max", "weighs no clients"),
        ("weighted-mean(DS;LD)", r"weighted-mean\(DS=2,LD=1\)"),
        ("choquet(DS,LD)", "TOML file"),
        ("owa(DS,LD)", "quantifier"),
    ],
)
def test_a_word_that_says_too_little_or_too_much_is_named(word: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        parse_rules([word], load("quickstart"))
    assert word in str(caught.value)


def test_a_fitted_rule_may_hold_a_semicolon_of_its_own() -> None:
    ((name, settings),) = parse_rules(["fitted(owa(VP,LD;most);steps=2)"], load("quickstart")).items()
    assert name == "fitted(owa(VP,LD;most);steps=2)"
    assert (settings.score, settings.quantifier) == ("owa", "most")
    assert settings.fit is not None
    assert settings.fit.steps == 2
