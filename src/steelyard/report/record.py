"""A record of a run to hand over: purpose, data by site, rule, contributions, privacy, attacks, versions, hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic_core import to_json

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.contributions.document import rule_of, stored_contributions
from steelyard.experiment.federations import stored_settings
from steelyard.experiment.loading import RUN_FILE
from steelyard.report.documents.proof import Record, RecordedSite
from steelyard.report.documents.shared import RecordedRule
from steelyard.report.documents.sweep import Attacks
from steelyard.report.hostile import CLEAN
from steelyard.report.notices import privacy_lines, privacy_of
from steelyard.report.record_page import record_html
from steelyard.report.verification import Verification, verify
from steelyard.report.view import RunView
from steelyard.runs.history import History
from steelyard.weighing import criterion

NO_PURPOSE = "not said: `description` of the experiment is empty"
NOT_MEASURED = "not measured in this run (`steelyard contributions`)"
NO_ATTACKS = "none recorded"
_NOT_COVERED = (
    "purpose, rows by class, flaws, attacks and versions are as the run noted them, outside the chain; so are "
    "contributions that were found out after the run"
)


def record(folder: Path, keys: Path | None = None, rule: str | None = None, attacks: Attacks | None = None) -> Record:
    """Return the record of a run for programs; without `rule`, of the recommended one, or else of the main one."""
    checked = verify(folder, keys)
    history = History(folder)
    view = RunView([history])
    compared = view.documents[0]
    advice = None if compared is None else compared["recommendation"]
    chosen = rule_of(history, rule or (None if advice is None else advice["rule"]))
    main = next(row for row in history.federations.to_dict("records") if row["rule"] == chosen)
    seed, info, experiment = int(main["seed"]), history.info, view.experiments[0]
    settings: RecordedRule = json.loads(str(main["settings"]))
    text = files.read_bytes(folder / RUN_FILE)
    values = stored_contributions(folder, chosen)
    return {
        "name": experiment.name,
        "purpose": experiment.description or NO_PURPOSE,
        "rule": chosen,
        "algorithm": str(main["algorithm"]),
        "why": [rule_sentence(str(main["settings"])), *([] if advice is None else [advice["sentence"]])],
        "settings": settings,
        "beside": [str(name) for name in dict.fromkeys(history.federations["rule"]) if name != chosen],
        "rounds": history.last_round,
        "measure": experiment.score_name,
        "result": _result(history, chosen, seed),
        "sites": _sites(history, chosen, seed),
        "contributions": NOT_MEASURED if isinstance(values, str) else values,
        "privacy": privacy_lines(privacy_of(history)) or ["no differential privacy was promised"],
        "attacks": [NO_ATTACKS] if attacks is None else attack_lines(attacks, chosen),
        "notes": history.notes,
        "versions": {key.removeprefix("version_"): value for key, value in info.items() if key.startswith("version_")},
        "hashes": {f"head after round {checked.round}": checked.head, RUN_FILE: hashlib.sha256(text).hexdigest()},
        "verified": _verified(checked),
        "not_covered": _NOT_COVERED,
    }


def _verified(checked: Verification) -> dict[str, str]:
    """Return what `verify` found: the verdict, what differs, what cannot be checked, what was looked at."""
    lists = {"changed": checked.found.changed, "cannot be checked": checked.found.unchecked}
    named = {name: "; ".join(one.line() for one in found) for name, found in lists.items() if found}
    return {"verdict": checked.verdict, **named, **checked.found.checked}


def rule_sentence(text: str) -> str:
    """Say what clients are weighed by under a stored rule, in words; criteria of the run's own code have only names."""
    rule = stored_settings(text)
    if rule is None:
        return "its settings are not of this version"
    if rule.trained_by == "server":
        return "No client is weighed: the server trains on its own rows alone."
    known = criterion.known()
    named = [f"{name} ({known[name].description})" if name in known else name for name in rule.criteria]
    if rule.policy is not None:
        words = f"Weights by {rule.policy.name}, computed from {', '.join(named)}"
    elif rule.score == "prioritized" and len(named) > 1:
        words = f"Clients are weighed by {', then '.join(named)}; each counts as far as those before it are met"
        words += "" if rule.adjust is None else ", and their order is adjusted while the federation learns"
    else:
        joined = f", joined by {rule.score}" if len(named) > 1 else ""
        power = f", to the power of {rule.power:g}" if rule.power is not None else ""
        words = f"Clients are weighed by {' and '.join(named)}{joined}{power}"
    words += "" if rule.fit is None else "; the weights are then fitted to the server's rows"
    words += "; what a client says of itself is bounded" if rule.bound is not None else ""
    words += "; no weight passes a cap" if rule.capped else ""
    words += "" if rule.defence is None else f"; updates are combined by {rule.defence.rule}, against hostile clients"
    return f"{words}."


def attack_lines(attacks: Attacks, rule: str) -> list[str]:
    """Say what each attack that `steelyard attack` ran did to a rule, a line each."""
    lines: list[str] = []
    for block in attacks["attacks"]:
        if block["attack"] == CLEAN:
            continue
        head = f"{block['attack']}, {attacks['fraction']:.0%} of the clients hostile"
        row = next((row for row in block["rules"] if row["rule"] == rule), None)
        if row is None:
            lines.append(f"{head}: tested under other rules only ({', '.join(row['rule'] for row in block['rules'])})")
            continue
        lost = "" if row["lost"] is None else f", {100 * row['lost']['mean']:.1f} points lost"
        weight = "" if row["weight"] is None else f"; they had {row['weight']:.0%} of all weight"
        lines.append(f"{head}: accuracy {row['accuracy']['mean']:.1%}{lost}{weight}")
    return lines or [NO_ATTACKS]


def _result(history: History, rule: str, seed: int) -> float | None:
    frame = history.rounds
    said = zip(frame["rule"], frame["seed"], frame["accuracy"], strict=True)
    mine = [float(value) for name, number, value in said if (name, number) == (rule, seed) and value == value]
    return mine[-1] if mine else None


def _sites(history: History, rule: str, seed: int) -> list[RecordedSite]:
    """Return what is known of each client: training rows, rows by class, flaws, its mean weight."""
    cohorts, labels = history.cohorts(rule, seed), history.labels(seed)
    flaws = history.flaws
    rows: list[RecordedSite] = []
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


def write_record(
    folder: Path, path: Path, keys: Path | None = None, rule: str | None = None, attacks: Attacks | None = None
) -> None:
    """Write a run's record as a page (.html) or for programs (.json)."""
    if path.suffix not in (".html", ".json"):
        raise UserError(f"--out: got '{path}'; allowed: a file that ends with .html or .json")
    document = record(folder, keys, rule, attacks)
    # Not to be known becomes null: a value from one seed has no interval.
    content = (
        record_html(document).encode("utf-8", "replace")
        if path.suffix == ".html"
        else to_json(document, indent=2, inf_nan_mode="null")
    )
    with told_as(f"--out: {path} cannot be written", "a writable file"):
        files.write(path, content)
