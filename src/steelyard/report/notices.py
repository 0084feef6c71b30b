"""What a reader must know of a run beside its figures: its chain, its privacy, lone clients, flawed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.base.errors import printable
from steelyard.base.settings import Document
from steelyard.report.rendering import Copied
from steelyard.rounds.progress import RAISE
from steelyard.runs.facts import Promise
from steelyard.runs.history import History


class Chain(Document):
    """The head of a run's chain, the round that it follows, and the first problem, empty where there is none."""

    head: str
    round: int
    problem: str


class SingleClient(Document):
    """How many of a rule's rounds weighed one client only."""

    rule: str
    seed: int
    rounds: int
    of: int


def chain_of(history: History) -> Chain:
    """Return the head of a run's chain, the round that it follows, and the first problem ("" where there is none)."""
    found = history.shown_chain
    return Chain(head=found.head, round=found.round, problem=found.problem)


def chain_line(chain: Chain) -> str:
    """Return one line on a chain: the warning, or the head; empty before the first checkpoint."""
    if chain.problem:
        return f"CHANGED since it was written: {printable(chain.problem)}; what is shown is what is there now"
    return f"chain head after round {chain.round}: {chain.head}" if chain.head else ""


def chain_lines(chain: Chain) -> list[Copied]:
    """Return `chain_line` for a terminal, which does not break it; nothing before the first checkpoint."""
    return [Copied(line)] if (line := chain_line(chain)) else []


def single_client_rounds(history: History) -> tuple[SingleClient, ...]:
    """Return each rule and seed with rounds that weighed one client; a sound run has none.

    The weight of a single client is all there is, so that such a round says nothing of a rule.
    """
    frame: Any = history.rounds
    frame = frame[frame["round"] > 0]
    frame = frame.assign(single=(frame["answered"] == 1) & (frame["kept_old"] == 0))
    return tuple(
        SingleClient(rule=str(rule), seed=int(seed), rounds=int(rows["single"].sum()), of=len(rows))
        for (rule, seed), rows in frame.groupby(["rule", "seed"], sort=False)
        if rows["single"].any()
    )


def single_client_lines(found: Sequence[SingleClient]) -> list[str]:
    """Return what a reader must know of such rounds: one sentence for all rules and seeds, or none."""
    if not found:
        return []
    most = max(found, key=lambda row: row.rounds / row.of)
    more = f", and so did {len(found) - 1} more of the rules and seeds" if len(found) > 1 else ""
    return [
        f"Warning: {most.rounds} of {most.of} rounds of {most.rule}, seed {most.seed}, weighed one client "
        f"only{more}: no rule can prefer one client to another there. {RAISE}"
    ]


def privacy_lines(promise: Promise | None) -> list[str]:
    """Return one line for each rule, and one for all of them together where there are several."""
    if promise is None:
        return []
    budget = "" if promise.budget is None else f" of {promise.budget:g}"
    where = {"central": "noise by the server", "local": "noise by the devices"}[promise.model]
    terms = f"at δ = {promise.delta:g} (client-level, {promise.neighbours}; {where}, {promise.accountant})"
    ended = {
        name: f"; stopped after round {round}, another would pass the budget" for name, round in promise.ended.items()
    }
    spent = {name: f"ε {value:.4g}{budget} {terms}{ended.get(name, '')}" for name, value in promise.epsilon.items()}
    if len(spent) == 1:
        return list(spent.values())
    lines = [f"{name}: {line}" for name, line in spent.items()]
    return [*lines, f"all of these together: ε {promise.together:.4g} for any one client"]


def flaws_of(history: History, seed: int) -> dict[str, list[str]]:
    """Return what is wrong with each flawed client of a seed, in plain words; empty for a run without flaws."""
    found: dict[str, list[str]] = {}
    for row in history.flaws.to_dict("records"):
        if int(row["seed"]) == seed:
            found.setdefault(str(row["client"]), []).append(str(row["flaw"]))
    return found
