"""The top of a report: which rule to use, and what flawed clients weighed."""

from __future__ import annotations

from collections import Counter

from steelyard.report.documents.comparison import Recommendation
from steelyard.report.notices import chain_line, chain_of, single_client_lines, single_client_rounds
from steelyard.report.view import RunView, flawed_means
from steelyard.runs.history import History


def headline(view: RunView) -> list[str]:
    """Return the answer in plain sentences, the recommendation first; several runs come one by one.

    Before it stands only what makes it doubtful: that the run was changed.
    """
    if len(view.histories) > 1:
        parts = zip(view.names, view.histories, strict=True)
        return [f"{name}: {' '.join(headline(RunView([history])))}" for name, history in parts]
    history, document = view.histories[0], view.documents[0]
    changed, single = _changed(history), single_client_lines(single_client_rounds(history))
    if document is None:
        return [*changed, *_state(view), *single, "No round has been tested: no accuracy is known."]
    found = document["recommendation"]
    return [*changed, found["sentence"], *single, *ended_lines(history), *_flawed(view, found)]


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


def _flawed(view: RunView, found: Recommendation) -> list[str]:
    """Say what flawed clients weighed under the baseline and under the rule that did best, as means over the seeds."""
    federation = view.federation()
    flaws = view.flaws(federation)
    known = {label: shares["weight"] for label in view.labels if (shares := flawed_means(view, label))}
    if not flaws or not known:
        return []
    clients = view.evaluations(federation)["client"].nunique() or view.clients(federation)["client"].nunique()
    common = Counter(flaw for each in flaws.values() for flaw in each).most_common(1)[0][0]
    shown = list(known)
    if len(shown) > 3:
        sign = -1.0 if found["less_is_better"] else 1.0
        others = [row for row in found["rules"] if row["difference"] and row["rule"] in known and not row["left_out"]]
        best = sorted(others, key=lambda row: sign * row["value"]["mean"])[-1:]
        shown = [label for label in (found["baseline"], *(row["rule"] for row in best)) if label in known]
    first, *rest = [f"{label} gave them {known[label]:.0%}" for label in shown]
    shares = ", ".join([f"{first} of all weight", *rest])
    return [f"{len(flaws)} of {clients} clients were flawed: {common}. {shares}."]
