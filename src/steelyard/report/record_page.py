"""The record of a run as one page for screen and paper, without scripts; long lists are cut, and whole in the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from steelyard.contributions.document import Contributions
from steelyard.report.contributed import contribution_table, headline
from steelyard.report.documents.proof import Record, RecordedSite
from steelyard.report.rendering import Table, as_html

MOST_SITES = 14
"""So many sites stand on the page; more would need a second one."""
MOST_VALUES = 8
MOST_FACTS = 8
MOST_LINES = 4
MOST_CLASSES = 10
LONGEST = 300
"""Most characters of one paragraph."""
_STYLE = """@page{size:A4;margin:9mm}body{font:13px/1.4 system-ui,sans-serif;max-width:188mm;margin:1.5rem auto;
padding:0 1rem;color:#111;background:#fff}h1{font-size:1.4em;margin:0}h2{font-size:1.05em;margin:.7em 0 .2em;
border-bottom:1px solid #999}table{border-collapse:collapse;width:100%}td,th{padding:.05em .4em;text-align:right;
border-bottom:1px solid #ddd;overflow-wrap:break-word}td:first-child,th:first-child{text-align:left;min-width:9em}
caption{display:none}
dl{margin:0;display:grid;grid-template-columns:max-content 1fr;gap:0 1em}dt{font-weight:600}
dd{margin:0;overflow-wrap:anywhere}p{margin:.15em 0;overflow-wrap:anywhere}
@media print{body{font-size:11px;line-height:1.2;margin:0;padding:0;max-width:none}h2{margin:.4em 0 .1em}
body.crowded{font-size:9px}}"""
ROOMY = 5400
"""Characters of a body up to which one printed page has room for larger letters."""


def record_html(document: Record) -> str:
    """Return a record as one page without scripts, for screen and paper."""
    result = "-" if document["result"] is None else f"{document['result']:.4f}"
    facts = {
        "Rule": f"{document['rule']}, algorithm {document['algorithm']}",
        "How it weighs": document["why"][0],
        "Why this rule": " ".join(document["why"][1:]) or "it is the run's main rule; none was recommended",
        "Beside it": _cut(", ".join(document["beside"])) or "no other rule",
        "Rounds": str(document["rounds"]),
        f"Last {document['measure']}": result,
    }
    given = document["contributions"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = [
        ("Purpose", _paragraphs([document["purpose"]])),
        ("Rule and result", _facts(facts)),
        ("Data by site", _sites(document["sites"])),
        ("Contributions", _paragraphs([given]) if isinstance(given, str) else _values(given)),
        ("Privacy spent", _paragraphs(document["privacy"])),
        ("Attacks tested", _paragraphs(document["attacks"])),
        ("Notes of the run", _paragraphs([document["notes"] or "none"])),
        ("Versions", _paragraphs([versions])),
        ("Hashes and checks", _facts({**document["hashes"], **document["verified"]})),
        ("What the chain does not cover", _paragraphs([document["not_covered"]])),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{inner}</section>" for title, inner in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(document['name'])}: record</title><style>{_STYLE}</style></head>"
        f'<body class="{"crowded" if len(body) > ROOMY else "roomy"}">'
        f"<h1>Record of {escape(document['name'])}</h1>{body}</body></html>"
    )


def _sites(sites: Sequence[RecordedSite]) -> str:
    rows = tuple(
        (
            site["client"], "-" if site["rows"] is None else str(site["rows"]), _classes(site["labels"]),
            ", ".join(site["flaws"]) or "none known", str(site["rounds"]),
            "-" if site["weight"] is None else f"{site['weight']:.4f}",
        )
        for site in sites[:MOST_SITES]
    )  # fmt: skip
    headings = ("site", "training rows", "rows by class", "flaws", "rounds", "mean weight")
    left = sites[MOST_SITES:]
    flawed = sum(bool(site["flaws"]) for site in left)
    total = sum(site["rows"] or 0 for site in left)
    more = f"and {len(left)} more sites with {total} training rows, {flawed} of them with known flaws" if left else ""
    return as_html(Table("", headings, rows, note=more))


def _classes(counts: Sequence[int]) -> str:
    more = len(counts) - MOST_CLASSES
    shown = " ".join(map(str, counts[:MOST_CLASSES]))
    return f"{shown} and {more} more" if more > 0 else shown or "not known"


def _values(found: Contributions) -> str:
    """Show what clients added, and all that is to be known before the values are used: "order only" is among it."""
    notes = f"<p>{escape(' '.join(found['notes']))}</p>"
    return _paragraphs([headline(found)]) + as_html(contribution_table(found, MOST_VALUES)) + notes


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… (whole in the JSON)"


def _paragraphs(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "".join(f"<p>{escape(_cut(line))}</p>" for line in [*lines[:MOST_LINES], *more])


def _facts(facts: Mapping[str, str]) -> str:
    rows = list(facts.items())
    more = [("", f"and {len(rows) - MOST_FACTS} more")] if len(rows) > MOST_FACTS else []
    shown = [*rows[:MOST_FACTS], *more]
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(_cut(words))}</dd>' for name, words in shown)}</dl>"
