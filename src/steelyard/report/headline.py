"""One paragraph on top of a report: who won by how much, in how many seeds, and what flawed clients weighed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steelyard.report.baseline import asks_clients
from steelyard.report.flawed import SMALL
from steelyard.report.notices import chain_line, chain_of, single_client_lines, single_client_rounds
from steelyard.report.statistics import estimate, paired_p, verdict
from steelyard.report.view import RunView, flawed_means
from steelyard.runs.reader import History


def headline(view: RunView) -> list[str]:
    """Return what happened in plain sentences; the first says who won. Several runs come one by one."""
    if len(view.histories) > 1:
        parts = zip(view.names, view.histories, strict=True)
        return [f"{name}: {' '.join(headline(RunView([history])))}" for name, history in parts]
    finals, what = _finals(view)
    state = [*_changed(view.histories[0]), *_state(view), *single_client_lines(single_client_rounds(view.histories[0]))]
    if not finals:
        return [*state, "No round has been tested on clients: no accuracy is known."]
    return [*state, *_result(view, finals, what), *ended_lines(view.histories[0]), *_flawed(view, finals)]


def _finals(view: RunView) -> tuple[dict[str, dict[int, float]], str]:
    """Return the last score of each rule and seed: on clean rows where all have them, else the clients' own.

    Where clients test models of their own, the clients' scores decide: the server has not seen those models.
    One that ended before its first test has that of its first model, as in the tables.
    """
    ended = {key for history in view.histories for key in history.ended}
    personal = any(history.personal for history in view.histories)
    for column, what in (("accuracy", ""),) if personal else (("server_accuracy", "on clean rows"), ("accuracy", "")):
        frame = view.rounds
        early = np.array([key in ended for key in zip(frame["rule"], frame["seed"], strict=True)], dtype=bool)
        frame = frame[frame[column].notna() & ((frame["round"] > 0) | early)]
        found: dict[str, dict[int, float]] = {}
        for (rule, seed), rows in frame.groupby(["rule", "seed"], sort=False):
            found.setdefault(str(rule), {})[int(seed)] = float(rows[column].iloc[-1])
        missing = set(view.labels) - set(found)
        if found and missing <= {rule for rule, _ in ended}:
            return found, what
    return {}, ""


def _changed(history: History) -> list[str]:
    found = chain_of(history)
    return [f"{chain_line(found)}."] if found["problem"] else []


def _state(view: RunView) -> list[str]:
    lines: list[str] = []
    for name, history in zip(view.names, view.histories, strict=True):
        status = history.info.get("status", "unknown")
        if status != "finished":
            last = int(history.rounds["round"].to_numpy().max()) if len(history.rounds) else 0
            planned = f" of {history.info['rounds']}" if "rounds" in history.info else ""
            lines.append(f"{name} is {status}: round {last}{planned}.")
    return lines


def ended_lines(history: History) -> list[str]:
    """Return a sentence for each rule and seed that ended before the others because its model exploded."""
    return [
        f"{rule}, seed {seed}, ended in round {round}: {reason}. Its figures are those of its last tested model."
        for (rule, seed), (round, reason) in history.ended.items()
    ]


def _score(view: RunView, value: float) -> str:
    return f"{value:.1%}" if view.measure == "accuracy" else f"{view.measure} {value:.4g}"


Finals = Mapping[str, Mapping[int, float]]
"""The last score of each rule, by its seeds."""


@dataclass(frozen=True)
class _Pair:
    """A rule and the baseline on the seeds that both have a score of; one that ended early may lack one."""

    label: str
    seeds: list[int]
    ours: list[float]
    theirs: list[float]

    @classmethod
    def of(cls, finals: Finals, label: str, base: str) -> _Pair:
        """Return the rule's scores beside the baseline's, seed by seed."""
        seeds = sorted(finals[label].keys() & finals.get(base, {}).keys())
        return cls(label, seeds, [finals[label][seed] for seed in seeds], [finals[base][seed] for seed in seeds])

    @property
    def gain(self) -> float:
        """How far the rule is ahead in the mean; minus infinity without a seed to compare."""
        return estimate(self.ours).mean - estimate(self.theirs).mean if self.seeds else -math.inf


def _result(view: RunView, finals: Finals, what: str) -> list[str]:
    base = view.baseline
    where = f" {what}" if what else " over all clients' test samples"
    asking = {one.label for one in view.federations if asks_clients(one.settings)}
    others = [label for label in view.labels if label != base and label in asking and label in finals]
    pairs = [pair for label in others if (pair := _Pair.of(finals, label, base)).seeds]
    if not pairs:
        only, values = next(iter(finals.items()))
        score = _score(view, estimate(list(values.values())).mean)
        return [f"{only} ended at {score}{where}; there is no other rule to hold it against."]
    best = max(pairs, key=lambda pair: pair.gain)
    ours, theirs = (_score(view, estimate(values).mean) for values in (best.ours, best.theirs))
    unit = f"{100 * best.gain:+.1f} points" if view.measure == "accuracy" else f"{best.gain:+.4g}"
    pair = f"{best.label} ended at {ours}{where}, {base} at {theirs}: {unit}"
    every = {one.seed for one in view.federations}
    if len(best.seeds) < len(every):
        pair += f", on the {len(best.seeds)} of {len(every)} seeds in which both were tested"
    return [_with_verdict(view, best, pair)]


def _with_verdict(view: RunView, best: _Pair, pair: str) -> str:
    """Finish the sentence on the best rule with what its seeds show."""
    if len(best.seeds) < 2:
        close = view.measure == "accuracy" and abs(best.gain) < SMALL
        tail = "too close to call" if close else "one seed, so it may be chance"
        return f"{pair} ({tail}; steelyard compare --seeds 10 shows)."
    gains = [one - other for one, other in zip(best.ours, best.theirs, strict=True)]
    won = sum(value > 0 for value in gains)
    p = paired_p(gains)
    words = {
        "better": f"{best.label} is better",
        "worse": f"{view.baseline} is better",
        "not distinguishable": "the seeds cannot tell them apart",
    }[verdict(best.gain, p)]
    return f"{pair}; ahead in {won} of {len(best.seeds)} seeds, and {words} (paired test, p = {p:.2g})."


def _flawed(view: RunView, finals: Finals) -> list[str]:
    """Say what flawed clients weighed under the baseline and under the best other rule, as means over the seeds."""
    federation = view.federation()
    flaws = view.flaws(federation)
    if not flaws:
        return []
    known = {label: found["weight"] for label in view.labels if (found := flawed_means(view, label))}
    if not known:
        return []
    clients = view.evaluations(federation)["client"].nunique() or view.clients(federation)["client"].nunique()
    common = Counter(flaw for found in flaws.values() for flaw in found).most_common(1)[0][0]
    shown = list(known)
    # A rule that ended before the server first tested it has weights, but no score there.
    others = [label for label in known if label != view.baseline and label in finals]
    if len(shown) > 3 and others:
        pairs = [_Pair.of(finals, label, view.baseline) for label in others]
        # Where the baseline itself has no score, the means decide.
        best = max(pairs, key=lambda pair: (pair.gain, estimate(list(finals[pair.label].values())).mean)).label
        shown = [label for label in (view.baseline, best) if label in known]
    first, *rest = [f"{label} gave them {known[label]:.0%}" for label in shown]
    shares = ", ".join([f"{first} of all weight", *rest])
    return [f"{len(flaws)} of {clients} clients were flawed: {common}. {shares}."]
