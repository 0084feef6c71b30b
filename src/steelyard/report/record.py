"""A record of a run to hand over: purpose, data by site, rule, contributions, privacy, attacks, versions, hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from steelyard.base import files
from steelyard.base.errors import UserError, brief, told_as
from steelyard.contributions.document import Contributions, rule_of, stored_contributions
from steelyard.experiment.description import stored_settings
from steelyard.experiment.loading import RUN_FILE
from steelyard.report.curves import flaws_of
from steelyard.report.rendering import Block, Table, filled
from steelyard.report.tables import privacy_lines
from steelyard.report.verification import Record, RecordedSite, Verification, verify
from steelyard.report.view import RunView, plain
from steelyard.runs.history import History
from steelyard.weighing.reading import reading

NO_PURPOSE = "not given: `description` of the experiment is empty"
NOT_MEASURED = "not measured in this run (`steelyard contributions`)"
NO_ATTACKS = "none recorded"
_NOT_COVERED = (
    "the closing record holds purpose, rows by class, flaws and versions as the run noted them: nobody else vouches "
    "for them. It does not hold attacks, nor contributions that were found out after the run"
)


def record(
    folder: Path,
    keys: Path | None = None,
    rule: str | None = None,
    attacks: Callable[[str], Sequence[str]] | None = None,
    checked: Verification | None = None,
) -> Record:
    """Return the record of a run for programs; without `rule`, of the recommended one, or else of the main one.

    `attacks` says what attacks that were tested did to a rule; `checked` what `verify` has found already.
    """
    checked = checked or verify(folder, keys)
    history = History(folder)
    view = RunView([history])
    advice = view.documents[0].recommendation
    chosen = rule_of(history, rule or (None if advice is None else advice.rule))
    main = next(row for row in history.federations.to_dict("records") if row["rule"] == chosen)
    seed, experiment = int(main["seed"]), view.experiments[0]
    text = files.read_bytes(folder / RUN_FILE)
    values = stored_contributions(folder, chosen)
    return {
        "name": experiment.name,
        "purpose": experiment.description or NO_PURPOSE,
        "rule": chosen,
        "recommended": advice is not None and advice.rule == chosen,
        "algorithm": str(main["algorithm"]),
        "why": [rule_sentence(str(main["settings"])), *([] if advice is None else [advice.sentence])],
        "settings": json.loads(str(main["settings"])),
        "beside": [str(name) for name in dict.fromkeys(history.federations["rule"]) if name != chosen],
        "rounds": checked.round,
        "measure": experiment.score_name,
        "result": _result(history, chosen, seed, checked.round),
        "sites": _sites(history, chosen, seed),
        "contributions": NOT_MEASURED if isinstance(values, str) else values,
        "privacy": privacy_lines(history.facts.privacy) or ["no differential privacy"],
        "findings": history.facts.finding_lines or ["nothing"],
        "attacks": list(attacks(chosen)) if attacks is not None else [NO_ATTACKS],
        "notes": history.notes,
        "versions": history.facts.versions,
        "hashes": {f"final hash, round {checked.round}": checked.closing, RUN_FILE: hashlib.sha256(text).hexdigest()},
        "verified": _verified(checked),
        "not_covered": _NOT_COVERED,
    }


def _verified(checked: Verification) -> dict[str, str]:
    """Return what `verify` found: the verdict, what differs, what cannot be checked, what was looked at."""
    lists = {"changed": checked.found.changed, "cannot be checked": checked.found.unchecked}
    named = {name: "; ".join(one.line() for one in found) for name, found in lists.items() if found}
    return {"verdict": checked.verdict, **named, **checked.found.checked}


def rule_sentence(text: str) -> str:
    """Say what clients are weighted by under a stored rule."""
    rule = stored_settings(text)
    return "its settings are not of this version" if rule is None else f"Weighting: {reading(rule)}."


def _result(history: History, rule: str, seed: int, last: int) -> float | None:
    """Return the newest score of a rule in the rounds that the chain holds."""
    frame: Any = history.rounds
    chained = frame[frame["round"] <= last]
    tested = chained[(chained["rule"] == rule) & (chained["seed"] == seed)]["accuracy"].dropna()
    return float(tested.iloc[-1]) if len(tested) else None


def _sites(history: History, rule: str, seed: int) -> list[RecordedSite]:
    """Return what is known of each client: training rows, rows by class, flaws, its mean weight."""
    cohorts, labels, flaws = history.cohorts(rule, seed), history.labels(seed), flaws_of(history, seed)
    rows: list[RecordedSite] = []
    for at, client in enumerate(cohorts.clients):
        mine = cohorts.client == at
        rows.append(
            {
                "client": client,
                "rows": int(cohorts.samples[mine].max()) if mine.any() else None,
                "labels": labels.get(client, []),
                "flaws": flaws.get(client, []),
                "rounds": int(mine.sum()),
                "weight": plain(float(cohorts.weight[mine].mean())) if mine.any() else None,
            }
        )
    return rows


def record_bytes(document: Record, suffix: str) -> bytes:
    """Return a record as a page (.html) or for programs (.json), as the ending of its file says."""
    if suffix == ".html":
        return record_html(document).encode("utf-8", "replace")
    if suffix != ".json":
        raise UserError(f"--out: got a file that ends with {brief(suffix)}; allowed: one that ends with .html or .json")
    # Not to be known becomes null: a value from one seed has no interval.
    return to_json(document, indent=2, inf_nan_mode="null")


def write_record(document: Record, path: Path, *, replace: bool = False) -> None:
    """Write a record to a file that is not there yet; `replace` writes it in place of one that is."""
    content = record_bytes(document, path.suffix)
    if path.exists() and not replace:
        raise UserError(f"--out: {path} is there already; allowed: a new file, or --force, which replaces it")
    with told_as(f"--out: {path} cannot be written", "a writable file"):
        files.write(path, content)


def page_differs(page: Path, document: Record) -> bool:
    """Say whether a record that was handed over is not what its run gives now."""
    with told_as(f"--check: {page} cannot be read", "a page or JSON that `steelyard record` wrote"):
        return files.read_bytes(page) != record_bytes(document, page.suffix)


# The page, without scripts; long lists are cut, and whole in the JSON.


MOST_SITES = 14
"""So many sites stand on the page; more would need a second one."""
MOST_VALUES = 8
MOST_FACTS = 8
MOST_LINES = 4
MOST_CLASSES = 10
LONGEST = 300
"""Most characters of one paragraph."""


def record_html(document: Record) -> str:
    """Return a record as one page without scripts, for screen and paper."""
    result = {
        "Rule": f"{document['rule']}, algorithm {document['algorithm']}",
        "Weighting": document["why"][0],
        "Why this rule": " ".join(document["why"][1:]) or "the run's main rule; none was recommended",
        "Compared with": _cut(", ".join(document["beside"])) or "no other rule",
        "Rounds": str(document["rounds"]),
        f"Last {document['measure']}": "-" if document["result"] is None else f"{document['result']:.4f}",
    }
    given = document["contributions"]
    measured = not isinstance(given, str)
    return filled(
        "record.html.j2",
        name=document["name"],
        verdict=_facts({"Verdict": document["verified"]["verdict"], **document["hashes"]}),
        purpose=_lines([document["purpose"]]),
        result=_facts(result),
        sites=_sites_table(document["sites"]),
        contributions=_lines([contributions_line(given) if measured else given]),
        values=contribution_table(given, MOST_VALUES) if measured else None,
        # All that is to be known before the values are used: "only the ranking" is among it.
        notes=" ".join(given["notes"]) if measured else "",
        privacy=_lines(document["privacy"]),
        attacks=_lines(document["attacks"]),
        findings=_lines(document["findings"]),
        run_notes=_lines([document["notes"] or "none"]),
        versions=_lines([", ".join(f"{name} {version}" for name, version in document["versions"].items())]),
        checks=_facts({name: words for name, words in document["verified"].items() if name != "verdict"}),
        not_covered=_lines([document["not_covered"]]),
    )


def _sites_table(sites: Sequence[RecordedSite]) -> Table:
    rows = tuple(
        (
            site["client"], "-" if site["rows"] is None else str(site["rows"]), _classes(site["labels"]),
            ", ".join(site["flaws"]) or "none known", str(site["rounds"]),
            "-" if site["weight"] is None else f"{site['weight']:.4f}",
        )
        for site in sites[:MOST_SITES]
    )  # fmt: skip
    headings = ("site", "training samples", "samples by class", "faults", "rounds", "mean weight")
    left = sites[MOST_SITES:]
    flawed = sum(bool(site["flaws"]) for site in left)
    total = sum(site["rows"] or 0 for site in left)
    more = f"and {len(left)} more sites, {flawed} with known faults: {total} training samples" if left else ""
    return Table("", headings, rows, note=more)


def _classes(counts: Sequence[int]) -> str:
    more = len(counts) - MOST_CLASSES
    shown = " ".join(map(str, counts[:MOST_CLASSES]))
    return f"{shown} and {more} more" if more > 0 else shown or "not known"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… (whole in the JSON)"


def _lines(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [*map(_cut, lines[:MOST_LINES]), *more]


def _facts(facts: Mapping[str, str]) -> dict[str, str]:
    shown = {name: _cut(words) for name, words in list(facts.items())[:MOST_FACTS]}
    return shown | ({"": f"and {len(facts) - MOST_FACTS} more"} if len(facts) > MOST_FACTS else {})


# What clients added, on the terminal and in a report.


MOST = 40
"""Clients in one table."""


def contributions_line(document: Contributions) -> str:
    """Say in a sentence what the rounds gained, in what, and what the values were made from."""
    method, rounds = document["method"], document["rounds"]
    span = f"round {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds"
    if method == "classes":
        return f"{document['rule']}, {span}: {document['unit']}; {document['source']}."
    low, high = _number(document["total_low"]), _number(document["total_high"])
    ends = f"went from {document['before']:.4g} to {document['after']:.4g}"
    return (
        f"{document['rule']}, {span}: {document['unit']} {ends}, a gain of {_number(_gain(document))}"
        + (f" ({low} to {high})" if method == "shapley" else "")
        + f"; {document['source']}."
    )


def _gain(document: Contributions) -> float:
    if document["method"] == "shapley":
        return document["total"]
    falls = document["measure"].endswith("loss")
    return (document["before"] - document["after"]) * (1 if falls else -1)


def contribution_table(document: Contributions, most: int = MOST) -> Table:
    """Lay out each client's value, the most helpful first; shares stand there only where they mean something.

    Of more than `most` clients, those that helped most and least are shown.
    """
    clients = document["clients"]
    shares = any(row["share"] is not None for row in clients)
    shown = clients if len(clients) <= most else [*clients[: most // 2], *clients[-most // 2 :]]
    rows = tuple(
        (
            row["client"],
            _number(row["value"]),
            f"{_number(row['low'])} to {_number(row['high'])}",
            row["verdict"],
            *((f"{row['share']:.0%}" if row["share"] is not None else "-",) if shares else ()),
        )
        for row in shown
    )
    headings = ("client", "added", "95 %", "verdict", *(("share",) if shares else ()))
    note = f"{most} of {len(clients)} clients: the most and the least helpful." if len(shown) < len(clients) else ""
    return Table(f"What each client added ({document['method']})", headings, rows, note)


def contribution_parts(document: Contributions) -> list[Block]:
    """Return what clients added as people read it: the sentence, the table, what it means."""
    return [contributions_line(document), contribution_table(document), *document["notes"]]


def _number(value: float) -> str:
    return f"{value:+.4f}" if abs(value) < 100 else f"{value:+.4g}"
