"""The answer from figures made by hand: tests, the correction over scenes, ranks, the sentence, the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import pytest
from tests.studies.made import SUITE, figures, on_paper

from steelyard.report.rendering import render
from steelyard.report.statistics import anytime_equivalence_p, holm, paired_p
from steelyard.studies.archive import SceneFigures, joined
from steelyard.studies.arena import Arena, judge
from steelyard.studies.arena_page import arena_html, arena_parts
from steelyard.studies.charts import gain_chart, rank_chart
from steelyard.studies.verdict import ArenaDocument, critical_difference, mean_ranks

BASE = [0.90, 0.91, 0.92, 0.90, 0.93, 0.91, 0.90, 0.92, 0.91, 0.90]


NOISE = [0.004, -0.003, 0.002, -0.004, 0.003, 0.001, -0.002, 0.004, -0.003, -0.002]


def shifted(by: float, times: float = 1.0) -> list[float]:
    return [value + by + times * noise for value, noise in zip(BASE, NOISE, strict=True)]


def judged(*gains: float, seeds: int = 10) -> ArenaDocument:
    """The answer where the candidate gains so much in each of the first scenes."""
    names = list(SUITE.scenes)[: len(gains)]
    made = {name: figures(BASE[:seeds], shifted(by)[:seeds]) for name, by in zip(names, gains, strict=True)}
    return judge(on_paper(names, seeds), made)


def opened(names: Sequence[str]) -> Arena:
    """An arena that goes on until it is decided."""
    return on_paper(names).model_copy(update={"seeds": SUITE.held_out, "opened": 1})


def test_better_worse_equal_and_unknown_are_told_apart() -> None:
    names = ["clean", "two-labels", "label-shares", "sizes"]
    made = [shifted(0.03), shifted(-0.03), shifted(0.0), shifted(0.004, 10.0)]
    document = judge(on_paper(names), {name: figures(BASE, mine) for name, mine in zip(names, made, strict=True)})
    assert [scene.verdict for scene in document.scenes] == ["better", "worse", "equal", "not distinguishable"]
    assert (document.better, document.worse, document.equal, document.failed) == (1, 1, 1, 0)
    assert [scene.seeds for scene in document.scenes] == [10] * 4
    assert document.mean_gain == pytest.approx(0.001)
    assert (document.scenes[0].about, document.scenes[0].where) == (SUITE.scenes["clean"].about, MADE["clean"].where)


WHY = "round 1 of X: criterion Z: RuntimeError: there is nothing at all to go by; allowed: numbers"
FAILED = figures(BASE, shifted(0.0), BASE).model_copy(
    update={"values": {"fedavg": tuple(BASE), "EQ": tuple(BASE)}, "failed": WHY}
)
NAMES = ["clean", "sizes", "hospitals", "two-labels", "free-riders"]
MADE = {
    "clean": figures(BASE, shifted(0.02), shifted(0.01)),
    "sizes": FAILED,
    "hospitals": figures(BASE, shifted(0.004), shifted(0.003)),
    "two-labels": figures(BASE, shifted(-0.01, 0.1), shifted(0.0)),
}
ANSWER = """
X is better than fedavg in 2 of 3 tasks, worse in 1, by 0.5 points on average; it failed in 1 task; 1 task not
done.

X against fedavg: suite small, version 2, not the whole suite
------------------------------------------------------------------------------------------
task         fedavg (%)                             X (%)        gain        p       worst
                                                             (points)   (Holm)     client,
                                                                                      gain
------------------------------------------------------------------------------------------
clean        91.0 ± 0.8                        93.0 ± 0.9  +2.0 ± 0.2  1.6e-08  +2.0 ± 0.2
sizes        91.0 ± 0.8  failed: there is nothing at all…           –        –           –
hospitals    91.0 ± 0.8                        91.4 ± 0.9  +0.4 ± 0.2   0.0029  +0.4 ± 0.2
two-labels   91.0 ± 0.8                        90.0 ± 0.8  −1.0 ± 0.0  1.4e-14  −1.0 ± 0.0
free-riders           –                                 –           –        –           –
------------------------------------------------------------------------------------------

X against fedavg: suite small, version 2, not the whole suite (continued)
--------------------------------------
task                           verdict
--------------------------------------
clean                           better
sizes                           failed
hospitals    better, within the margin
two-labels                       worse
free-riders                   not done
--------------------------------------
Mean of 10 seeds ± half the 95% interval, on samples that no choice used. Mean gain +0.5 ± 0.2 points. Paired
t-tests, Holm's correction over the tasks. Equal: within 1 point by two one-sided tests.

Every rule over the tasks
-------------------------------------------------
rule    mean rank  accuracy (%)  worst client (%)
-------------------------------------------------
X            1.67    91.5 ± 0.8        81.5 ± 0.8
EQ           1.83    91.4 ± 0.9        81.4 ± 0.9
fedavg       2.50    91.0 ± 0.8        81.0 ± 0.8
-------------------------------------------------
Rank 1 is the best. Accuracies: mean over the tasks ± half the 95% interval over the seeds. Over the 3 of 5
tasks in which every rule has figures. Mean ranks less than 1.91 apart do not differ significantly (Nemenyi,
5%).

- sizes: failed: round 1 of X: criterion Z: RuntimeError: there is nothing at all to go by; allowed: numbers
"""


def test_the_answer_reads_well_in_110_columns() -> None:
    """A scene of each kind: better, failed, better but within the margin, worse, not done."""
    document = judge(on_paper(NAMES), MADE)
    assert render(arena_parts(document), width=110).strip() == ANSWER.strip()
    assert document.scenes[1].failed == WHY
    first, other = document.scenes[0], document.scenes[3]
    assert [rule.gain and round(rule.gain.mean, 6) for rule in first.rules] == [None, 0.02, 0.01]
    # Holm over three scenes: the smallest p three times, the largest once.
    assert other.p_holm == pytest.approx(3 * other.p)
    assert document.scenes[2].p_holm == document.scenes[2].p


def test_the_page_holds_the_answer_escaped_and_its_pictures() -> None:
    changes = {"tried": {"<b>": 0.5, "c": 0.25}, "candidate": "X<i>"}
    document = judge(on_paper(NAMES), MADE).model_copy(update=changes)
    page = arena_html(document)
    for part in (
        "<h1>X&lt;i&gt; in the arena</h1>",
        f"<p>{escape(document.sentence)}</p>",
        "<h3>Gain in each task</h3>",
        "<h3>Every rule by its mean rank, and which do not differ significantly</h3>",
        f"<li>sizes: failed: {WHY}</li>",
        "<dt>suite</dt><dd>small, version 2, not the whole</dd>",
        "<dt>seeds</dt><dd>101, 102, 103,",
        f"<dd>{SUITE.sha256}</dd>",
        "<dt>level of the tests</dt><dd>5%</dd>",
        "<dt>settings tried</dt><dd>&lt;b&gt;: 50.0%, c: 25.0%</dd>",
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
    ):
        assert part in page
    assert page.count("<svg") == 2
    assert "<script" not in page
    bare = arena_html(judge(on_paper(["clean"], 3), {}))
    assert "<svg" not in bare


def test_charts_show_every_rule_by_rank_and_every_gain_with_its_interval() -> None:
    document = judge(on_paper(NAMES), MADE)
    drawn = rank_chart(document.model_copy(update={"critical_difference": 0.5})).to_dict()
    (rows,) = drawn["datasets"].values()
    assert [(row["rule"], row["role"]) for row in rows] == [("X", "candidate"), ("EQ", "rival"), ("fedavg", "rival")]
    spans = [(max(1.0, rank - 0.5), min(3.0, rank + 0.5)) for rank in (5 / 3, 11 / 6, 2.5)]
    assert [row[end] for row in rows for end in ("low", "high")] == pytest.approx(
        [end for span in spans for end in span]
    )
    assert drawn["usermeta"]["note"].startswith("Line: ranks less than 0.50 apart")
    assert len(rank_chart(document.model_copy(update={"critical_difference": None})).to_dict()["layer"]) == 1
    drawn = gain_chart(document).to_dict()
    rows = next(rows for rows in drawn["datasets"].values() if "scene" in rows[0])
    found = [(row["scene"], round(row["mean"], 6), row["verdict"]) for row in rows]
    assert found == [("clean", 2.0, "better"), ("hospitals", 0.4, "better"), ("two-labels", -1.0, "worse")]
    assert all(row["low"] < row["mean"] < row["high"] for row in rows)
    one_seed, two_rules, nothing = judged(0.1, seeds=1), judged(0.1), judge(on_paper(["clean"]), {})
    assert [len(chart.to_dict()["layer"]) for chart in (gain_chart(one_seed), gain_chart(two_rules))] == [2, 3]
    assert rank_chart(two_rules) is rank_chart(nothing) is gain_chart(nothing) is None


def test_the_same_models_are_equal_though_four_zeros_are_too_few_for_a_test() -> None:
    few, digests = figures(BASE[:4], BASE[:4]), tuple("abcd")
    same = few.model_copy(update={"models": {"fedavg": digests, "X": digests}})
    near = few.model_copy(update={"models": {"fedavg": digests, "X": (*digests[:3], "e")}})
    names = ["clean", "sizes", "hospitals"]
    document = judge(on_paper(names), dict(zip(names, (same, near, few), strict=True)))
    assert [scene.verdict for scene in document.scenes] == ["equal", *["not distinguishable"] * 2]
    (one,) = judge(on_paper(["clean"], 2), {"clean": same}).scenes
    assert (one.verdict, one.p, one.equal_p_holm) == ("untested", None, None), "two seeds test nothing"


def test_the_mean_gain_has_the_interval_of_its_seeds() -> None:
    made = {"clean": figures(BASE, shifted(0.03)), "sizes": figures(BASE, shifted(0.01))}
    document = judge(on_paper(["clean", "sizes"]), made)
    assert document.gain_over_seeds.values == pytest.approx([0.02 + noise for noise in NOISE])
    assert "Mean gain +2.0 ± 0.2 points." in render(arena_parts(document))
    uneven = judge(on_paper(["clean", "sizes"]), made | {"sizes": figures(BASE[:5], shifted(0.01)[:5])})
    assert uneven.gain_over_seeds is None, "seeds that a scene lacks pair with nothing"
    assert "Mean gain" not in render(arena_parts(uneven))
    one = judged(0.02)
    assert "Mean gain" not in render(arena_parts(one)), "one scene says it itself"
    assert "not the whole suite" in render(arena_parts(one))
    assert "not the whole" not in render(arena_parts(one.model_copy(update={"whole": True})))
    assert "Mean of 10 seeds" in render(arena_parts(one))
    assert "\nOne seed, on samples" in render(arena_parts(judged(0.02, seeds=1)))
    assert " Tests that may be looked at" in render(arena_parts(one.model_copy(update={"opened": 1})))


def test_the_correction_is_over_all_scenes() -> None:
    """A p that would do alone does not do among ten scenes of which nine show nothing."""
    names = list(SUITE.scenes)
    alone = figures(BASE, shifted(0.013, 5.0))
    (scene,) = judge(on_paper(names[:1]), {names[0]: alone}).scenes
    assert scene.verdict == "better"
    assert 0.005 < scene.p < 0.05
    assert scene.p == paired_p([a - b for a, b in zip(alone.values["X"], BASE, strict=True)])
    document = judge(on_paper(names), dict.fromkeys(names, figures(BASE, shifted(0.0, 5.0))) | {names[0]: alone})
    assert [each.p_holm for each in document.scenes] == holm([each.p for each in document.scenes])
    assert document.better == 0


@pytest.mark.parametrize(
    ("document", "changes", "words"),
    [
        (judged(0.02, 0.004), {}, "X is better than fedavg in 2 of 2 tasks, worse in none, by 1.2 points on average."),
        (judged(0.02), {"candidate": "a"}, "a is better than fedavg in 1 of 1 task, worse in none, by 2.0 points on"),
        (judged(0.02, 0.02, -0.2), {}, "in 2 of 3 tasks, worse in 1, 5.3 points behind on average."),
        (
            judged(0.02, -0.02),
            {},
            "X is not better than fedavg: better in 1 of 2 tasks, worse in 1, equal within 1 point in none, "
            "0.0 points ahead on average.",
        ),
        (judged(-0.01, seeds=2), {}, "Two seeds are too few to compare X with fedavg: over 1 task it is 1 poi"),
        (judged(0.02), {"failed": 2, "draft": True}, "; it failed in 2 tasks; on the tuning seeds."),
        (judged(0.02), {"opened": 1}, "; all decided by 10 seeds or fewer."),
        (judged(0.02, seeds=1), {"opened": 1}, "; 1 not decided by 1 seed."),
        (judged(0.02), {"opened": 2, "level": 1 / 120}, "; tested at 0.83% as candidate 2 here."),
        (judge(on_paper(["clean", "sizes"]), {}), {}, "No recommendation: no task has ended under X."),
    ],
)
def test_the_sentence(document: Any, changes: dict[str, Any], words: str) -> None:
    assert words in document.model_copy(update=changes).sentence


def test_an_idea_that_fails_everywhere_is_one_sentence() -> None:
    failed = SceneFigures(failed="criterion Z: fails.")
    for names, words in ((["clean"], "1 of 1 task"), (NAMES[:3], "3 of 3 tasks")):
        document = judge(on_paper(names), dict.fromkeys(names, failed))
        assert document.sentence == f"X failed in {words}: criterion Z: fails."
        shown = render(arena_parts(document), width=40)
        assert max(map(len, shown.splitlines())) <= 40
        assert "points" not in shown
    assert "failed: fails" in render(arena_parts(judge(on_paper(NAMES), MADE | {"sizes": failed})))
    # Where the baseline has no figures there is nothing to compare with.
    alone = SceneFigures(values={"X": tuple(BASE)})
    assert judge(on_paper(["clean"]), {"clean": alone}).scenes[0].failed == "fedavg has no figures"


def test_a_verdict_stays_and_scenes_that_wait_count_in_the_correction() -> None:
    arena, draws = opened(["clean", "sizes", "hospitals"]), np.random.default_rng(1)
    base = draws.normal(0.8, 0.02, 40)
    mine, words = base + draws.normal(0.05, 0.01, 40), list[str]()
    for count in range(5, 41, 5):
        document = judge(arena, {"clean": figures(base[:count].tolist(), mine[:count].tolist())})
        scene = document.scenes[0]
        assert scene.p_holm == pytest.approx(min(1.0, 3 * scene.p))
        words.append(scene.verdict)
    assert words == sorted(words, key=lambda word: word == "better")
    assert document.sentence.endswith("2 tasks not done; 2 not decided by 40 seeds.")
    same = judge(arena, {"clean": figures(base.tolist(), base.tolist())}).scenes[0]
    assert (same.verdict, same.p_holm) == ("equal", 1.0)
    assert same.equal_p_holm == pytest.approx(3 * anytime_equivalence_p([0.0] * 40, SUITE.margin))


def test_the_highest_is_first_and_equal_ones_share_a_rank() -> None:
    assert mean_ranks([[0.9, 0.8, 0.7], [0.5, 0.6, 0.6]]) == [2.0, 1.75, 2.25]


@pytest.mark.parametrize(("rules", "q"), [(2, 1.960), (9, 3.102)])
def test_the_critical_difference_is_the_published_one(rules: int, q: float) -> None:
    """By Demšar's table of the studentised range."""
    assert critical_difference(rules, 14) == pytest.approx(q * math.sqrt(rules * (rules + 1) / (6 * 14)), abs=2e-3)
    assert critical_difference(2, 3) == pytest.approx(1.96 * math.sqrt(6 / 18), abs=1e-3)
    assert critical_difference(9, 2) is critical_difference(1, 10) is None


def test_batches_are_joined_where_a_rule_has_figures_in_each() -> None:
    def batch(head: str, found: SceneFigures, failed: str = "") -> SceneFigures:
        models = {rule: (f"{head}-{rule}",) for rule in found.values}
        return found.model_copy(update={"models": models, "head": head, "failed": failed})

    first, second = batch("a", figures([0.5], [0.7], [0.6])), batch("b", figures([0.25], [0.75]), "why")
    second.worst.pop("X")
    assert joined([first, second]) == SceneFigures(
        values={"fedavg": (0.5, 0.25), "X": (0.7, 0.75)},
        worst={"fedavg": (0.4, 0.15)},
        models={"fedavg": ("a-fedavg", "b-fedavg"), "X": ("a-X", "b-X")},
        head="a b",
        where=first.where,
        failed="why",
    )
