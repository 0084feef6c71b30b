"""A record of a run to hand over: purpose, data by site, rule, contributions, privacy, versions, hashes."""

from __future__ import annotations

import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

from steelyard import files
from steelyard.contributions.document import stored_contributions
from steelyard.errors import UserError
from steelyard.experiment.loading import RUN_FILE, read_experiment
from steelyard.report.notices import privacy_lines, privacy_of
from steelyard.report.rendering import Table, as_html
from steelyard.report.verification import verify
from steelyard.runs.reader import History

_STYLE = """@page{size:A4;margin:14mm}body{font:13px/1.4 system-ui,sans-serif;max-width:180mm;margin:1.5rem auto;
padding:0 1rem;color:#111;background:#fff}h1{font-size:1.5rem;margin:0}h2{font-size:1rem;margin:1rem 0 .3rem;
border-bottom:1px solid #999}table{border-collapse:collapse;width:100%}td,th{padding:.1rem .4rem;text-align:right;
border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}dt{font-weight:600;float:left;clear:left;
width:9rem}dd{margin:0 0 0 9.5rem;overflow-wrap:anywhere}p{margin:.2rem 0}"""


def record(folder: Path, keys: Path | None = None) -> dict[str, Any]:
    """Return the record of a run for programs; what it does not know it says in words."""
    history, experiment = History(folder), read_experiment(folder)
    main = history.federations.iloc[0]
    rule, seed = str(main["rule"]), int(main["seed"])
    checked = verify(folder, keys)
    found = stored_contributions(folder)
    text = files.read_bytes(folder / RUN_FILE)
    info = history.info
    return {
        "name": experiment.name,
        "purpose": experiment.description or "not said: `description` of the experiment is empty",
        "rule": {"name": rule, "algorithm": str(main["algorithm"]), "settings": json.loads(str(main["settings"]))},
        "beside": [str(name) for name in dict.fromkeys(history.federations["rule"]) if name != rule],
        "rounds": history.last_round,
        "measure": info.get("measure", "accuracy"),
        "result": _result(history, rule, seed),
        "sites": _sites(history, rule, seed),
        "contributions": found if isinstance(found, str) else found["clients"],
        "privacy": privacy_lines(privacy_of(history)) or ["no differential privacy was promised"],
        "attacks": info.get("attack", "none was tested in this run"),
        "notes": info.get("notes", ""),
        "versions": {key.removeprefix("version_"): value for key, value in info.items() if key.startswith("version_")},
        "hashes": {"head": checked.head, "after round": checked.round, RUN_FILE: hashlib.sha256(text).hexdigest()},
        "verified": {"verdict": checked.verdict, **checked.found.checked},
        "not covered": "purpose, rows by class, flaws and versions are as the run noted them, outside the chain",
    }


def _result(history: History, rule: str, seed: int) -> float | None:
    frame = history.rounds
    said = zip(frame["rule"], frame["seed"], frame["accuracy"], strict=True)
    mine = [float(value) for name, number, value in said if (name, number) == (rule, seed) and value == value]
    return mine[-1] if mine else None


def _sites(history: History, rule: str, seed: int) -> list[dict[str, Any]]:
    """Return what is known of each client: training rows, rows by class, flaws, its mean weight."""
    cohorts, labels = history.cohorts(rule, seed), history.labels(seed)
    flaws = history.flaws
    rows: list[dict[str, Any]] = []
    for at, client in enumerate(cohorts.clients):
        mine = cohorts.client == at
        words = flaws[(flaws["seed"] == seed) & (flaws["client"] == client)]["flaw"].tolist()
        weight = float(cohorts.weight[mine].mean()) if mine.any() else None
        rows.append(
            {
                "client": client,
                "rows": int(cohorts.samples[mine].max()) if mine.any() else None,
                "labels": labels.get(client, []),
                "flaws": [str(word) for word in words],
                "rounds": int(mine.sum()),
                "weight": None if weight is None or weight != weight else weight,
            }
        )
    return rows


def record_html(document: dict[str, Any]) -> str:
    """Return a record as one page without scripts, for screen and paper."""
    sites = tuple(
        (
            str(site["client"]), str(site["rows"]), " ".join(map(str, site["labels"])) or "-",
            ", ".join(site["flaws"]) or "none known", str(site["rounds"]),
            "-" if site["weight"] is None else f"{site['weight']:.4f}",
        )
        for site in document["sites"]
    )  # fmt: skip
    table = Table("", ("site", "training rows", "rows by class", "flaws", "rounds", "mean weight"), sites)
    rule, given = document["rule"], document["contributions"]
    settings = {key: value for key, value in rule["settings"].items() if value not in (None, [], {}, "")}
    result = "-" if document["result"] is None else f"{document['result']:.4f}"
    values = given if isinstance(given, str) else _values(given)
    facts = {
        "Rule": f"{rule['name']}, algorithm {rule['algorithm']}",
        "Why this rule": f"criteria {', '.join(settings['criteria'])}; " + json.dumps(settings),
        "Beside it": ", ".join(document["beside"]) or "no other rule",
        "Rounds": str(document["rounds"]),
        f"Last {document['measure']}": result,
    }
    parts = [
        ("Purpose", f"<p>{escape(document['purpose'])}</p>"),
        ("Rule and result", _facts(facts)),
        ("Data by site", as_html(table)),
        ("Contributions", values if not isinstance(given, str) else f"<p>{escape(given)}</p>"),
        ("Privacy spent", "".join(f"<p>{escape(line)}</p>" for line in document["privacy"])),
        ("Attacks tested", f"<p>{escape(document['attacks'])}</p><p>{escape(document['notes'])}</p>"),
        ("Versions", f"<p>{escape(', '.join(f'{k} {v}' for k, v in document['versions'].items()))}</p>"),
        ("Hashes and checks", _facts({**document["hashes"], **document["verified"]})),
        ("What the chain does not cover", f"<p>{escape(document['not covered'])}</p>"),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{inner}</section>" for title, inner in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(document['name'])}: record</title><style>{_STYLE}</style></head><body>"
        f"<h1>Record of {escape(document['name'])}</h1>{body}</body></html>"
    )


def _values(clients: list[dict[str, Any]]) -> str:
    rows = tuple((str(c["client"]), f"{c['value']:.4f}", f"{c['low']:.4f}", f"{c['high']:.4f}") for c in clients)
    return as_html(Table("", ("site", "value", "low", "high"), rows))


def _facts(facts: dict[str, Any]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>' for k, v in facts.items())}</dl>"


def write_record(folder: Path, path: Path, keys: Path | None = None) -> None:
    """Write a run's record as a page (.html) or for programs (.json)."""
    if path.suffix not in (".html", ".json"):
        raise UserError(f"--output: got '{path}'; allowed: a file that ends with .html or .json")
    document = record(folder, keys)
    content = record_html(document) if path.suffix == ".html" else json.dumps(document, indent=2, ensure_ascii=False)
    try:
        files.write(path, content.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror}; allowed: a writable file") from error
