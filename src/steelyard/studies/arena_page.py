"""The answer of an arena as one HTML page: the sentence, the gains and ranks as pictures, the tables.

It has no scripts and needs no network; text from a candidate's file is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from steelyard.base.errors import listed
from steelyard.base.measures import UNKNOWN, show_estimate
from steelyard.report.figures import svg
from steelyard.report.figures.look import WIDTH, described
from steelyard.report.rendering import Table, filled, paragraph, render
from steelyard.studies.suite import Suite, Tried
from steelyard.studies.verdict import ArenaDocument, ArenaScene

LONGEST_REASON = 24
"""Letters of a reason in a cell."""
PART = ", not the whole suite"
"""The end of a table's title, where scenes or seeds were left out or fields changed."""


def arena_text(document: ArenaDocument, width: int | None = None) -> str:
    """Write the answer as plain text; the sentence comes first."""
    found = render(arena_tables(document), failure_lines(document), "text", width)
    return f"{paragraph(document['sentence'], 'text', width)}\n\n{found}"


def arena_tables(document: ArenaDocument) -> list[Table]:
    """Return a line for each scene, and every rule over the scenes where there are more than the two."""
    return [_scenes(document), *([_rules(document)] if len(document["ranks"]) > 2 else [])]


def tuning_text(suite: Suite, found: Sequence[Tried], width: int | None = None, *, whole: bool = True) -> str:
    """Write which of each rival's settings did best, beside the one that is frozen with the suite."""
    rows = [
        (
            label,
            UNKNOWN if math.isnan(value) else f"{100 * value:.2f}",
            *_marks(label == tried.best, label in suite.rivals),
        )
        for tried in found
        for label, value in tried.values.items()
    ]
    other = [tried.rule for tried in found if tried.best not in suite.rivals]
    answer = f"Other settings than the frozen ones are best for {listed(other)}." if other else "As frozen."
    seeds = listed(map(str, suite.choose[: suite.tuning.seeds]))
    table = Table(
        f"Settings of the rivals: suite {suite.name}, version {suite.version}{'' if whole else PART}",
        ("setting", "accuracy (%)", "best", "frozen"),
        tuple(rows),
        f"On the clients' own test rows, mean over the scenes and the seeds {seeds}.",
    )
    return f"{answer}\n\n{render([table], [], 'text', width)}"


def _marks(*marks: bool) -> tuple[str, ...]:
    return tuple("yes" if mark else "" for mark in marks)


def _scenes(document: ArenaDocument) -> Table:
    name, base = document["candidate"], document["baseline"]
    whole = "" if document["whole"] else PART
    title = f"{name} against {base}: suite {document['suite']}, version {document['version']}{whole}"
    if not any(scene["rules"] for scene in document["scenes"]):
        # An idea that failed everywhere: nothing but dashes would stand between.
        return Table(title, ("scene", "verdict"), tuple((row["scene"], row["verdict"]) for row in document["scenes"]))
    return Table(
        title,
        ("scene", f"{base} (%)", f"{name} (%)", "gain (points)", "p (Holm)", "worst client, gain", "verdict"),
        tuple(_cells(scene, document) for scene in document["scenes"]),
        _note(document),
    )


def _note(document: ArenaDocument) -> str:
    opened = document["opened"]
    counts = sorted({scene["seeds"] for scene in document["scenes"] if scene["seeds"]}) or [len(document["seeds"])]
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    what = "One seed" if counts == [1] else f"Mean of {seeds} seeds ± half the 95 % interval"
    tests = "Tests that may be looked at after any seed (betting on signs)" if opened else "Paired t-tests"
    gain = document["gain_over_seeds"]
    several = gain is not None and len(document["scenes"]) > 1
    mean = f" Mean gain {show_estimate(gain, 1, 100.0, signed=True)} points." if several else ""
    return (
        f"{what}, on rows that chose nothing.{mean} {tests}, "
        f"Holm's correction over the scenes. Equal: within {100 * document['margin']:g} point by two one-sided tests."
    )


def _cells(scene: ArenaScene, document: ArenaDocument) -> tuple[str, ...]:
    by_rule = {row["rule"]: row for row in scene["rules"]}
    base, mine = by_rule.get(document["baseline"]), by_rule.get(document["candidate"])
    p = scene["p_holm"]
    return (
        scene["scene"],
        show_estimate(base["value"] if base else None, 1, 100.0),
        _failed(scene["failed"]) if scene["failed"] else show_estimate(mine["value"] if mine else None, 1, 100.0),
        show_estimate(scene["gain"], 1, 100.0, signed=True),
        UNKNOWN if p is None else f"{p:.2g}",
        show_estimate(scene["worst_gain"], 1, 100.0, signed=True),
        _verdict(scene, document["level"]),
    )


def _failed(why: str) -> str:
    """Return the heart of a reason for a cell; the whole of it is a line below the table."""
    heart = why.partition("; allowed")[0].rpartition(": ")[2]
    return f"failed: {heart if len(heart) <= LONGEST_REASON else f'{heart[: LONGEST_REASON - 1]}…'}"


def _verdict(scene: ArenaScene, level: float) -> str:
    equal = scene["equal_p_holm"] is not None and scene["equal_p_holm"] < level
    return (
        f"{scene['verdict']}, within the margin"
        if equal and scene["verdict"] in ("better", "worse")
        else scene["verdict"]
    )


def _rules(document: ArenaDocument) -> Table:
    critical = document["critical_difference"]
    apart = (
        "" if critical is None else f" Mean ranks less than {critical:.2f} apart cannot be told apart (Nemenyi, 5 %)."
    )
    ranked, of = {row["rule"] for row in document["ranks"]}, len(document["scenes"])
    every = sum({row["rule"] for row in scene["rules"]} >= ranked for scene in document["scenes"])
    where = "" if every == of else f" Over the {every} of {of} scenes in which all of them have figures."
    return Table(
        "Every rule over the scenes",
        ("rule", "mean rank", "accuracy (%)", "worst client (%)"),
        tuple(
            (row["rule"], f"{row['rank']:.2f}", *(show_estimate(row[name], 1, 100.0) for name in ("value", "worst")))
            for row in document["ranks"]
        ),
        f"Rank 1 is the best. Accuracies: mean over the scenes ± half the 95 % interval over the seeds.{where}{apart}",
    )


def failure_lines(document: ArenaDocument) -> list[str]:
    """Return a line for each scene in which the candidate failed, with the reason."""
    return [f"{scene['scene']}: failed: {scene['failed']}" for scene in document["scenes"] if scene["failed"]]


# The answer of an arena as one HTML page: the sentence, the gains and ranks as pictures, the tables.


ROW = 26
"""Height of a rule's line, in pixels."""
LETTER = 6.5
"""Room for a letter of a rule's name, in pixels: where a wider font stands in, a picture would cut long names off."""


def arena_html(document: ArenaDocument) -> str:
    """Return the answer as one page that opens without a network."""
    # With very few scenes no difference of ranks is critical, and the picture has no bars.
    apart = "" if document["critical_difference"] is None else ", and what cannot be told apart"
    drawn = {
        "Gain in each scene": gain_chart(document),
        f"Every rule by its mean rank{apart}": rank_chart(document),
    }
    facts = {
        "suite": f"{document['suite']}, version {document['version']}{'' if document['whole'] else ', not the whole'}",
        "SHA-256 of the suite": document["sha256"],
        "seeds": ", ".join(map(str, document["seeds"])),
        "level of the tests": f"{100 * document['level']:g} %",
    }
    if document["tried"]:
        facts["settings tried"] = ", ".join(f"{name}: {100 * value:.1f} %" for name, value in document["tried"].items())
    return filled(
        "arena.html.j2",
        title=f"{document['candidate']} in the arena",
        sentence=document["sentence"],
        figures={title: svg(chart) for title, chart in drawn.items() if chart is not None},
        tables=arena_tables(document),
        failed=failure_lines(document),
        what=facts,
    )


def rank_chart(document: ArenaDocument) -> alt.LayerChart | None:
    """Draw mean ranks as points, the best on top; a line through each spans what cannot be told apart from it.

    Two rules whose ranks lie further apart than the critical difference differ: neither point is on the other's line.
    None with fewer than three rules, and where no scene has figures of every rule.
    """
    ranks = document["ranks"]
    if len(ranks) < 3:
        return None
    critical = document["critical_difference"]
    last = float(len(ranks))
    rows = [
        {
            "rule": row["rule"],
            "rank": row["rank"],
            "low": max(1.0, row["rank"] - (critical or 0.0)),
            "high": min(last, row["rank"] + (critical or 0.0)),
            "role": "candidate" if row["rule"] == document["candidate"] else "rival",
        }
        for row in ranks
    ]
    base = alt.Chart(pd.DataFrame(rows))
    names = [row["rule"] for row in ranks]
    axis = alt.Axis(labelLimit=220, minExtent=min(220.0, LETTER * max(map(len, names))))
    rule = alt.Y("rule:N", title=None, sort=names, axis=axis)
    scale = alt.Scale(domain=[1, max(last, 2.0)], nice=False, zero=False, padding=10)
    rank = alt.X("rank:Q", title="mean rank (1 is the best)", scale=scale, axis=alt.Axis(tickMinStep=1))
    colour = alt.Color("role:N", scale=alt.Scale(domain=["candidate", "rival"]), legend=alt.Legend(title=None))
    tips = [alt.Tooltip("rule:N"), alt.Tooltip("rank:Q", format=".2f")]
    layers: list[Any] = [base.mark_point(filled=True, size=90, opacity=1).encode(rank, rule, colour, tooltip=tips)]
    if critical is not None:
        layers.insert(0, base.mark_rule(opacity=0.45).encode(alt.X("low:Q", scale=scale), rule, colour, x2="high:Q"))
    chart = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(ranks))
    note = "" if critical is None else f"Line: ranks less than {critical:.2f} apart, which cannot be told apart (5 %)."
    return described(chart, f"Mean rank of each rule over the scenes of the suite {document['suite']}.", note)


def gain_chart(document: ArenaDocument) -> alt.LayerChart | None:
    """Draw the candidate's gain over the baseline in each scene, with its interval; None before one is done."""
    rows: list[dict[str, Any]] = [
        {"scene": scene["scene"], "verdict": scene["verdict"]}
        | {end: 100 * gain[end] for end in ("mean", "low", "high")}
        for scene in document["scenes"]
        if (gain := scene["gain"]) is not None
    ]
    if not rows:
        return None
    base = alt.Chart(pd.DataFrame(rows))
    scene = alt.Y("scene:N", title=None, sort=[row["scene"] for row in rows], axis=alt.Axis(labelLimit=220))
    title = f"points over {document['baseline']}"
    shape = alt.Shape("verdict:N", legend=alt.Legend(title=None))
    tips = [alt.Tooltip("scene:N"), alt.Tooltip("mean:Q", format="+.1f"), alt.Tooltip("verdict:N")]
    layers: list[Any] = [
        alt.Chart(pd.DataFrame([{"zero": 0.0}])).mark_rule(strokeDash=[4, 3], opacity=0.6).encode(x="zero:Q"),
        base.mark_point(filled=True, size=90, opacity=1).encode(
            alt.X("mean:Q", title=title), scene, shape, tooltip=tips
        ),
    ]
    if not any(math.isnan(row["low"]) for row in rows):
        layers.insert(1, base.mark_rule().encode(alt.X("low:Q", title=title), scene, x2="high:Q"))
    chart = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(rows))
    return described(chart, f"Gain of {document['candidate']} over {document['baseline']} in each scene.", "")
