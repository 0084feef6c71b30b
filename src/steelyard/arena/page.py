"""The answer of an arena as one HTML page: the sentence, the gains, the ranks with the critical difference, the tables.

It has no scripts and needs no network; text from a candidate's file is escaped.
"""

from __future__ import annotations

from html import escape

from steelyard.arena.figure import gain_chart, rank_chart
from steelyard.arena.table import arena_tables, failure_lines
from steelyard.report.assets import text
from steelyard.report.documents.arena import ArenaDocument
from steelyard.report.figures.writing import svg
from steelyard.report.rendering import as_html

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
