"""The answer from figures made by hand: the tests, the correction over the scenes, and the sentence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.arena.made import SUITE, figures, on_paper

from steelyard.arena.figures import SceneFigures
from steelyard.arena.table import arena_text
from steelyard.arena.verdict import judge
from steelyard.report.statistics import holm, paired_p

BASE = [0.90, 0.91, 0.92, 0.90, 0.93, 0.91, 0.90, 0.92, 0.91, 0.90]
NOISE = [0.004, -0.003, 0.002, -0.004, 0.003, 0.001, -0.002, 0.004, -0.003, -0.002]


def shifted(by: float, times: float = 1.0) -> list[float]:
    return [value + by + times * noise for value, noise in zip(BASE, NOISE, strict=True)]


def test_better_worse_equal_and_unknown_are_told_apart() -> None:
    names = ["clean", "two-labels", "label-shares", "sizes"]
    made = [shifted(0.03), shifted(-0.03), shifted(0.0), shifted(0.004, 10.0)]
    document = judge(on_paper(names), {name: figures(BASE, mine) for name, mine in zip(names, made, strict=True)})
    assert [scene["verdict"] for scene in document["scenes"]] == ["better", "worse", "equal", "not distinguishable"]
    assert (document["better"], document["worse"], document["equal"], document["failed"]) == (1, 1, 1, 0)
    assert document["sentence"] == (
        "X is not better than fedavg: better in 1 of 4 scenes, worse in 1, equal within 1 point in 1, 0.1 points ahead "
        "on average."
    )


def test_the_same_models_are_equal_though_four_zeros_are_too_few_for_a_test() -> None:
    few = figures(BASE[:4], BASE[:4])
    assert judge(on_paper(["clean", "sizes"]), {"clean": few, "sizes": few})["equal"] == 0
    digests = tuple("abcd")
    same = few.model_copy(update={"models": {"fedavg": digests, "X": digests}})
    near = few.model_copy(update={"models": {"fedavg": digests, "X": (*digests[:3], "e")}})
    document = judge(on_paper(["clean", "sizes"]), {"clean": same, "sizes": near})
    assert [scene["verdict"] for scene in document["scenes"]] == ["equal", "not distinguishable"]


def test_the_mean_gain_has_the_interval_of_its_seeds() -> None:
    made = {"clean": figures(BASE, shifted(0.03)), "sizes": figures(BASE, shifted(0.01))}
    document = judge(on_paper(["clean", "sizes"]), made)
    found = document["gain_over_seeds"]
    assert found is not None
    assert found["mean"] == pytest.approx(document["mean_gain"])
    assert found["values"] == pytest.approx([0.02 + noise for noise in NOISE])
    assert "Mean gain +2.0 ± 0.2 points." in arena_text(document)
    uneven = judge(on_paper(["clean", "sizes"]), made | {"sizes": figures(BASE[:5], shifted(0.01)[:5])})
    assert uneven["gain_over_seeds"] is None, "seeds that a scene lacks pair with nothing"
    assert "Mean gain" not in arena_text(uneven)


def test_the_correction_is_over_all_scenes() -> None:
    """A p that would do alone does not do among ten scenes of which nine show nothing."""
    names = list(SUITE.scenes)
    alone = shifted(0.013, 5.0)
    p = paired_p([a - b for a, b in zip(alone, BASE, strict=True)])
    assert p is not None
    assert 0.005 < p < 0.05
    assert judge(on_paper(names[:1]), {names[0]: figures(BASE, alone)})["better"] == 1
    others = [figures(BASE, shifted(0.0, 5.0)) for _ in names[1:]]
    document = judge(on_paper(names), dict(zip(names, [figures(BASE, alone), *others], strict=True)))
    raw = [scene["p"] for scene in document["scenes"]]
    assert [scene["p_holm"] for scene in document["scenes"]] == holm(raw)
    assert document["better"] == 0


def test_a_better_one_says_by_how_much() -> None:
    made = {"clean": figures(BASE, shifted(0.02)), "sizes": figures(BASE, shifted(0.004))}
    assert judge(on_paper(["clean", "sizes"]), made)["sentence"] == (
        "X is better than fedavg in 2 of 2 scenes, worse in none, by 1.2 points on average."
    )


def test_better_in_more_scenes_but_behind_on_average_is_said() -> None:
    names = ["clean", "sizes", "free-riders"]
    made = [shifted(0.02), shifted(0.02), shifted(-0.2)]
    said = judge(on_paper(names), {name: figures(BASE, mine) for name, mine in zip(names, made, strict=True)})
    assert said["sentence"].endswith("in 2 of 3 scenes, worse in 1, 5.3 points behind on average.")


@pytest.mark.parametrize(("seeds", "words"), [(1, "one seed"), (2, "two seeds")])
def test_two_seeds_decide_nothing(seeds: int, words: str) -> None:
    document = judge(on_paper(["clean"], seeds), {"clean": figures(BASE[:seeds], shifted(0.3)[:seeds])})
    assert document["scenes"][0]["verdict"] == "untested"
    assert document["scenes"][0]["equal_p_holm"] is None
    assert f"cannot be told from fedavg by {words}: over 1 scene it is 30" in document["sentence"]


def test_failed_and_missing_scenes_are_said_and_take_no_part() -> None:
    why = "round 1 of X: criterion Z: RuntimeError: there is nothing at all to go by; allowed: numbers"
    alone = figures(BASE, shifted(0.0)).model_copy(update={"values": {"fedavg": tuple(BASE)}, "failed": why})
    made = {"clean": figures(BASE, shifted(0.02), shifted(0.01)), "sizes": alone}
    document = judge(on_paper(["clean", "sizes", "hospitals"]), made)
    shown = arena_text(document)
    assert "sizes      91.0 ± 0.8  failed: there is nothing at all…" in shown, shown
    assert "Over the 1 of 3 scenes in which all of them have figures." in shown
    assert [scene["verdict"] for scene in document["scenes"]] == ["better", "failed", "not done"]
    assert document["scenes"][0]["p"] == document["scenes"][0]["p_holm"]
    assert document["sentence"].endswith("by 2.0 points on average; it failed in 1 scene; 1 scene not done.")
    assert f"- sizes: failed: {why}" in shown


def test_an_idea_that_fails_everywhere_is_one_sentence() -> None:
    failed = SceneFigures(failed="criterion Z: fails.")
    document = judge(on_paper(["clean", "sizes"]), {"clean": failed, "sizes": failed})
    assert document["sentence"] == "X failed in both scenes: criterion Z: fails."
    shown = arena_text(document, width=40)
    assert max(map(len, shown.splitlines())) <= 40
    assert "points" not in shown
    assert judge(on_paper(["clean"]), {})["sentence"] == "Nothing can be said of X yet: no scene is done."


def test_the_first_line_is_the_sentence_and_the_worst_client_is_a_column() -> None:
    document = judge(on_paper(["clean"]), {"clean": figures(BASE, shifted(0.02), shifted(0.01))})
    text = arena_text(document, width=100)
    assert text.splitlines()[0] == document["sentence"]
    assert "worst client" in text
    assert [row["rule"] for row in document["ranks"]] == ["X", "EQ", "fedavg"]
    first = document["ranks"][0]
    assert first["worst"]["mean"] == pytest.approx(first["value"]["mean"] - 0.1)
    assert first["value"]["high"] - first["value"]["low"] > 0


def test_one_of_twenty_null_suites_at_most_calls_something_better_or_worse() -> None:
    """200 suites in which the candidate is FedAvg with other noise: a false answer in 5 % of them, give or take."""
    draws = np.random.default_rng(7)
    names = list(SUITE.scenes)

    def scene() -> SceneFigures:
        rows: Sequence[Sequence[float]] = draws.normal(0.9, 0.01, (2, 10)).tolist()
        return figures(*rows)

    wrong = 0
    for _ in range(200):
        document = judge(on_paper(names), {name: scene() for name in names})
        wrong += document["better"] + document["worse"] > 0
    assert wrong / 200 <= 0.05 + 2 * (0.05 * 0.95 / 200) ** 0.5
