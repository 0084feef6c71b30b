"""Weighing again in the browser: the rules in JavaScript and those of `src` give the weights of one table of cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steelyard.report.rendering import asset
from steelyard.weighing.rule import Rule, WeighingSettings

TWO = [[1, 2], [3, 2]]
THREE = [[1, 0.5, 0.25], [0.5, 1, 1]]
ZEROS = [[0, 1], [0, 3]]
CASES: list[tuple[list[list[float]], dict[str, Any], list[int]]] = [
    # raw [client][criterion], the rule, the weights worked out by hand, as proportions.
    ([[10], [30], [60]], {"score": "prioritized"}, [1, 3, 6]),
    ([[7]], {"score": "prioritized"}, [1]),
    ([[1], [1], [2]], {"score": "mean", "normalise": "rank"}, [1, 1, 2]),
    (TWO, {"score": "mean"}, [3, 5]),
    (TWO, {"score": "mean", "normalise": "max"}, [2, 3]),
    (TWO, {"score": "mean", "normalise": "rank"}, [5, 7]),
    (TWO, {"score": "prioritized"}, [1, 3]),
    (TWO, {"score": "prioritized", "order": [1, 0]}, [5, 7]),
    (TWO, {"score": "prioritized", "order": [1, 0], "normalise": "max"}, [2, 3]),
    (TWO, {"score": "prioritized", "order": [1]}, [1, 1]),
    (TWO, {"score": "weighted-mean", "weights": [3, 1]}, [5, 11]),
    (TWO, {"score": "weighted-mean", "weights": [1, 3], "order": [1, 0]}, [5, 11]),
    (TWO, {"score": "product"}, [1, 3]),
    (TWO, {"score": "power", "power": 2}, [1, 9]),
    (THREE, {"score": "owa", "normalise": "max", "quantifier": "all"}, [1, 2]),
    (THREE, {"score": "owa", "normalise": "max", "quantifier": "most"}, [7, 13]),
    (THREE, {"score": "owa", "normalise": "max", "quantifier": "at-least-half"}, [5, 6]),
    (THREE, {"score": "owa", "normalise": "max", "quantifier": "as-many-as-possible"}, [1, 2]),
    (ZEROS, {"score": "mean"}, [3, 5]),
    (ZEROS, {"score": "mean", "normalise": "max"}, [2, 3]),
    (ZEROS, {"score": "mean", "normalise": "rank"}, [3, 4]),
    ([[0, 1], [1, 0]], {"score": "product"}, [1, 1]),  # all scores are 0
]


@pytest.mark.parametrize(("raw", "rule", "proportions"), CASES)
def test_the_library_gives_the_weights(raw: list[list[float]], rule: dict[str, Any], proportions: list[int]) -> None:
    settings = dict(rule)
    order = settings.pop("order", range(len(raw[0])))
    made = Rule(WeighingSettings(criteria=tuple(f"c{column}" for column in order), **settings))
    assert made.weigh(np.array(raw, dtype=np.float64)[:, list(order)]).weights == pytest.approx(shares(proportions))


@pytest.mark.slow
def test_the_browser_gives_the_weights(browser: Any) -> None:
    page = browser.new_page()
    page.add_script_tag(content=asset("reweigh.js"))
    for raw, rule, proportions in CASES:
        given = {"normalise": "share", "order": list(range(len(raw[0]))), **rule}
        found = page.evaluate("([raw, rule]) => SteelyardWeigh.weigh(raw, rule)", [raw, given])
        assert found == pytest.approx(shares(proportions)), (raw, rule)
    page.close()


def shares(proportions: list[int]) -> list[float]:
    return [part / sum(proportions) for part in proportions]
