"""Which rule the others are held against, FedAvg where it is among them, and what the seeds say of each, in clauses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.measures import MEASURES, Measure, estimate
from steelyard.report.documents.comparison import PairedTest, RuleTests, Verdict
from steelyard.report.documents.shared import RecordedRule
from steelyard.report.statistics import holm, paired_p, verdict
from steelyard.runs.history import History


def is_fedavg(settings: RecordedRule) -> bool:
    """Say whether recorded settings of a rule are FedAvg: dataset size alone, neither fitted, adapted nor sharpened."""
    sharpened = settings.get("score") == "power" and settings.get("power") not in (None, 1)
    adapts = (settings.get("loss") or {}).get("adapt", "none") != "none"
    return (
        list(settings["criteria"]) == ["DS"]
        and not (sharpened or adapts or settings.get("fit"))
        and settings.get("normalise", "share") != "rank"
        and asks_clients(settings)
    )


def asks_clients(settings: RecordedRule) -> bool:
    """Say whether a rule asks clients at all; the control "server-only" does not."""
    return settings.get("trained_by", "clients") == "clients"


def find_baseline(history: History, wanted: str | None) -> str:
    """Return the rule that the others are held against: the one asked for, else FedAvg, else the first."""
    rules = {str(row["rule"]): json.loads(row["settings"]) for row in history.federations.to_dict("records")}
    if wanted is not None:
        if wanted not in rules:
            raise UserError(f"--baseline: got '{wanted}'{nearest(wanted, rules)}; allowed: {listed(rules)}")
        return wanted
    return next((name for name, settings in rules.items() if is_fedavg(settings)), next(iter(rules)))


TestName = Literal[
    "gain",
    "final",
    "late",
    "server_accuracy",
    "server_accuracy_late",
    "server_macro_f1",
    "server_macro_f1_late",
    "server_mape",
    "server_c_index",
    "server_dice",
]
"""What rules are held against the baseline by."""


def verdicts(
    measured: Mapping[TestName, Mapping[str, Sequence[float]]],
    baseline: str,
    rules: Sequence[str],
    last: int = 5,
    score: Measure = MEASURES["accuracy"],
) -> list[Verdict]:
    """Test every rule against the baseline, per measure with Holm's correction over the rules, and say it in words.

    `last` is how many rounds the measures of the last rounds are means of; `score` is what each client's score is.
    """
    found: dict[str, RuleTests] = {rule: {} for rule in rules[1:]}
    for measure, by_rule in measured.items():
        raw = [paired_p(by_rule[rule]) for rule in rules[1:]]
        for rule, p, adjusted in zip(rules[1:], raw, holm(raw), strict=True):
            mean = estimate(by_rule[rule])
            found[rule][measure] = {
                **mean.as_json(),
                "p": p,
                "p_holm": adjusted,
                "verdict": verdict(mean.mean, adjusted),
            }
    return [
        {"rule": rule, **tests, "sentence": sentence(rule, baseline, tests, last, score)}
        for rule, tests in found.items()
    ]


_PHRASES: dict[TestName, tuple[str, str, float]] = {
    # measure: what is compared, unit, factor
    "gain": ("rounds to the targets", "rounds gained on average", 1.0),
    "final": ("score after the last round", "points", 100.0),
    "late": ("mean score of the last rounds", "points", 100.0),
    "server_accuracy": ("accuracy on the server's test set", "points", 100.0),
    "server_macro_f1": ("macro F1 on the server's test set", "", 1.0),
    "server_accuracy_late": ("mean accuracy of the last rounds on the server's test set", "points", 100.0),
    "server_macro_f1_late": ("mean macro F1 of the last rounds on the server's test set", "", 1.0),
    "server_c_index": ("C-index on the server's test set", "", 1.0),
    "server_dice": ("mean Dice on the server's test set", "", 1.0),
    "server_mape": ("error on the server's test set", "points of MAPE saved", 100.0),
}


def sentence(rule: str, baseline: str, tests: RuleTests, last: int = 5, score: Measure = MEASURES["accuracy"]) -> str:
    """Say plainly whether a rule is better, worse or not distinguishable from the baseline, measure by measure."""
    parts: list[str] = []
    given = cast("dict[TestName, PairedTest]", tests)
    for measure, test in given.items():
        what, unit, factor = _PHRASES[measure]
        what = what.replace("last rounds", f"last {last} rounds")
        if measure in ("final", "late") and not score.percent:
            what, unit, factor = what.replace("score", score.name), "", 1.0
        amount = f"{_signed(test['mean'] * factor)} {unit}".strip()
        if test["verdict"] == "untested":
            parts.append(f"{what} {amount}")
            continue
        low, high = test["low"] * factor, test["high"] * factor
        parts.append(
            f"{test['verdict']} in {what} ({amount}, 95 % interval {_signed(low)} to {_signed(high)}, "
            f"p = {test['p_holm']:.2g} after Holm's correction)"
        )
    text = f"{rule} against {baseline}: {'; '.join(parts)}."
    single = any(test["verdict"] == "untested" for test in given.values())
    return f"{text} One seed: it may be chance." if single else text


def _signed(value: float) -> str:
    """Write a difference with its sign; one that is only rounding of sums, such as -9.25e-18 rounds, is 0."""
    return f"{0.0 if abs(value) < 1e-12 else value:+.3g}"
