"""What a reader must know of a run beside its figures: its chain, its privacy, lone clients, flawed ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from steelyard.base.errors import UserError, printable
from steelyard.report.result import Chain, FlawedShares, Promise, Recommendation, SingleClient
from steelyard.rounds.progress import RAISE
from steelyard.runs.history import History

_PROMISE = TypeAdapter(Promise)


def chain_of(history: History) -> Chain:
    """Return the head of a run's chain, the round that it follows, and the first problem ("" where there is none)."""
    found = history.shown_chain
    return {"head": found.head, "round": found.round, "problem": found.problem}


def chain_line(chain: Chain) -> str:
    """Return one line on a chain: the warning, or the head; empty before the first checkpoint."""
    if chain["problem"]:
        return f"CHANGED since it was written: {printable(chain['problem'])}; what is shown is what is there now"
    return f"chain head after round {chain['round']}: {chain['head']}" if chain["head"] else ""


def single_client_rounds(history: History) -> list[SingleClient]:
    """Return each rule and seed with rounds that weighed one client; a sound run has none.

    The weight of a single client is all there is, so that such a round says nothing of a rule.
    """
    frame: Any = history.rounds
    frame = frame[frame["round"] > 0]
    frame = frame.assign(single=(frame["answered"] == 1) & (frame["kept_old"] == 0))
    return [
        {"rule": str(rule), "seed": int(seed), "rounds": int(rows["single"].sum()), "of": len(rows)}
        for (rule, seed), rows in frame.groupby(["rule", "seed"], sort=False)
        if rows["single"].any()
    ]


def single_client_lines(found: Sequence[SingleClient]) -> list[str]:
    """Return what a reader must know of such rounds: one sentence for all rules and seeds, or none."""
    if not found:
        return []
    most = max(found, key=lambda row: row["rounds"] / row["of"])
    more = f", and so did {len(found) - 1} more of the rules and seeds" if len(found) > 1 else ""
    return [
        f"Warning: {most['rounds']} of {most['of']} rounds of {most['rule']}, seed {most['seed']}, weighed one client "
        f"only{more}: no rule can prefer one client to another there. {RAISE}"
    ]


def privacy_of(history: History) -> Promise | None:
    """Return what a run promised to its clients and what it spent; None where it promised nothing, or goes on."""
    text = history.info.get("privacy")
    if not text:
        return None
    try:
        return _PROMISE.validate_python(json.loads(text))
    except (ValueError, ValidationError, RecursionError):
        raise UserError(f"{history.folder}: its record of privacy cannot be read; allowed: as it was") from None


def privacy_lines(promise: Promise | None) -> list[str]:
    """Return one line for each rule, and one for all of them together where there are several."""
    if promise is None:
        return []
    budget = "" if promise["budget"] is None else f" of {promise['budget']:g}"
    where = {"central": "noise by the server", "local": "noise by the devices"}[promise["model"]]
    terms = f"at δ = {promise['delta']:g} (client-level, {promise['neighbours']}; {where}, {promise['accountant']})"
    ended = {
        name: f"; stopped after round {round}, another would pass the budget"
        for name, round in promise["ended"].items()
    }
    spent = {name: f"ε {value:.4g}{budget} {terms}{ended.get(name, '')}" for name, value in promise["epsilon"].items()}
    if len(spent) == 1:
        return list(spent.values())
    lines = [f"{name}: {line}" for name, line in spent.items()]
    return [*lines, f"all of these together: ε {promise['together']:.4g} for any one client"]


# How much of the weight flawed clients got, and what that did to the model.


def flaws_of(history: History, seed: int) -> dict[str, list[str]]:
    """Return what is wrong with each flawed client of a seed, in plain words; empty for a run without flaws."""
    found: dict[str, list[str]] = {}
    for row in history.flaws.to_dict("records"):
        if int(row["seed"]) == seed:
            found.setdefault(str(row["client"]), []).append(str(row["flaw"]))
    return found


def flawed_shares(history: History, rule: str, seed: int) -> FlawedShares | None:
    """Return the share of all weight, of all samples and of all updates that flawed clients had; None without flaws."""
    flawed = flaws_of(history, seed)
    if not flawed:  # before the clients' table is read, which is large in a long run
        return None
    found = history.cohorts(rule, seed)
    weighed = ~np.isnan(found.weight)
    if not weighed.any():
        return None
    theirs = np.isin(found.client, [index for index, name in enumerate(found.clients) if name in flawed])[weighed]
    weight, samples = found.weight[weighed], found.samples[weighed]
    return {
        "weight": float(weight[theirs].sum() / (weight.sum() or 1.0)),
        "samples": float(samples[theirs].sum() / (samples.sum() or 1.0)),
        "updates": float(theirs.mean()),
    }


def flawed_lines(
    flaws: Mapping[str, Sequence[str]], clients: int, weights: Mapping[str, float], found: Recommendation
) -> list[str]:
    """Say in one sentence who was flawed, and what share of all weight each rule gave them; nothing without flaws.

    `weights` are by rule, means over the seeds. Of more than three rules, the baseline and the best other are named.
    """
    if not flaws or not weights:
        return []
    common = Counter(flaw for each in flaws.values() for flaw in each).most_common(1)[0][0]
    shown = list(weights)
    if len(shown) > 3:
        sign = -1.0 if found["less_is_better"] else 1.0
        others = [row for row in found["rules"] if row["difference"] and row["rule"] in weights and not row["left_out"]]
        best = sorted(others, key=lambda row: sign * row["value"]["mean"])[-1:]
        shown = [rule for rule in (found["baseline"], *(row["rule"] for row in best)) if rule in weights]
    first, *rest = [f"{rule} gave them {weights[rule]:.0%}" for rule in shown]
    return [f"{len(flaws)} of {clients} clients were flawed: {common}. {', '.join([f'{first} of all weight', *rest])}."]
