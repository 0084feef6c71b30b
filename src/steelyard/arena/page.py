"""The answer of an arena as one HTML page: the sentence, the gains and ranks as pictures, the tables.

It has no scripts and needs no network; text from a candidate's file is escaped.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

import altair as alt
import pandas as pd

from steelyard.arena.table import arena_tables, failure_lines
from steelyard.arena.verdict import ArenaDocument
from steelyard.report.assets import text
from steelyard.report.figures.catalogue import svg
from steelyard.report.figures.look import WIDTH, described
from steelyard.report.rendering import as_html

ROW = 26
"""Height of a rule's line, in pixels."""
LETTER = 6.5
"""Room for a letter of a rule's name, in pixels: where a wider font stands in, a picture would cut long names off."""
_MORE = "figure svg{max-width:100%;height:auto;background:#fff;overflow:visible}"


def arena_html(document: ArenaDocument) -> str:
    """Return the answer as one page that opens without a network."""
    # With very few scenes no difference of ranks is critical, and the picture has no bars.
    apart = "" if document["critical_difference"] is None else ", and what cannot be told apart"
    drawn = [
        ("Gain in each scene", gain_chart(document)),
        (f"Every rule by its mean rank{apart}", rank_chart(document)),
    ]
    figures = "".join(
        f"<figure><figcaption><h3>{escape(title)}</h3></figcaption>{svg(chart)}</figure>"
        for title, chart in drawn
        if chart is not None
    )
    tables = "".join(as_html(table) for table in arena_tables(document))
    failed = "".join(f"<li>{escape(line)}</li>" for line in failure_lines(document))
    title = f"{document['candidate']} in the arena"
    facts = {
        "suite": f"{document['suite']}, version {document['version']}{'' if document['whole'] else ', not the whole'}",
        "SHA-256 of the suite": document["sha256"],
        "seeds": ", ".join(map(str, document["seeds"])),
        "level of the tests": f"{100 * document['level']:g} %",
    }
    if document["tried"]:
        facts["settings tried"] = ", ".join(f"{name}: {100 * value:.1f} %" for name, value in document["tried"].items())
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Steelyard</title><style>{text('style.css')}{_MORE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>"
        f'<div class="headline"><p>{escape(document["sentence"])}</p></div></header><main>'
        f'<section id="result"><h2>What came out</h2>{figures}{tables}</section>'
        + (f'<section id="failed"><h2>What failed</h2><ul>{failed}</ul></section>' if failed else "")
        + f'<section id="what"><h2>What was run</h2><dl class="facts">{listed}</dl></section></main></body></html>'
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
