"""Which rule to use, in one or two sentences: one measure, one paired test for each rule, Holm's correction over them.

A rule is recommended in place of the baseline if it is better over at least three seeds (paired t-test, p < 0.05 after
Holm's correction over all rules that are compared). If none is, the baseline is kept, and the sentence says which
difference would not have been seen: one that this test sees less than four times of five. Rows that chose something
about a rule, its order or its clients' weights, do not decide, and which of several better rules is recommended is
chosen by rows that do not report: docs/reference/experiments.md has the conditions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from steelyard.base.measures import Estimate, deviation, estimate, measure_of, show_estimate
from steelyard.report.result import Recommendation, TestedRule
from steelyard.report.statistics import LEAST_SEEDS, detectable, holm, paired_p, seeds_for, verdict


@dataclass(frozen=True)
class MeasuredOn:
    """What rules are held against each other by, and on which rows."""

    name: str
    """accuracy, ndcg@10, RMSE."""
    where: str
    """On which rows, as the end of a sentence: "on the server's 46 rows"."""
    less_is_better: bool = False
    refused: str = ""
    """Why nothing may be recommended by it; empty where something may."""

    @property
    def percent(self) -> bool:
        """Whether values are shares of rows, which are shown in per cent and differences in points."""
        return measure_of(self.name).percent

    def value(self, value: float) -> str:
        """Write a value: 89.3%, or ndcg@10 0.1842."""
        return f"{value:.1%}" if self.percent else f"{self.name} {value:.4g}"

    def amount(self, difference: float) -> str:
        """Write how large a difference is, without its sign."""
        size = abs(100 * difference if self.percent else difference)
        if not self.percent:
            return f"{size:.3g}"
        shown = f"{size:.1f}" if size >= 0.095 or not size else f"{size:.1g}"
        return "1 point" if shown == "1.0" else f"{shown} points"


@dataclass(frozen=True)
class Compared:
    """What one rule, or the comparison as a whole, has against being recommended."""

    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """By rule: why it is not recommended whatever its figures say."""
    problem: str = ""
    """Why nothing is recommended at all, such as a run that goes on."""
    controls: frozenset[str] = frozenset()
    """Rules that ask no clients."""
    chosen_on: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """By rule: its values on rows that do not report, more is better; of several better rules they choose one."""
    choosing: str = ""
    """Which rows those are, or, where the rows that report choose as well, a sentence that says so."""
    reported_on: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """By rule, seed by seed: its values on the rows that did not choose, where these are not all of the rows."""
    reported_where: str = ""
    """Which rows those are, as the end of a sentence."""
    cannot_choose: str = ""
    """Why no rule of several better ones may be chosen; empty where one may."""
    too_few: str = ""
    """Why the rows that report decide nothing; empty where they are enough."""
    command: str = "steelyard compare"
    """What to run again with more seeds."""
    addition: str = ""
    """A further sentence, such as what the comparison spent of the clients' privacy."""


def recommend(
    values: Mapping[str, Sequence[float]], baseline: str, measure: MeasuredOn, compared: Compared | None = None
) -> Recommendation:
    """Return which rule to use, from one value for each rule and seed, and the tests behind it.

    The seeds stand in the same order for every rule: differences are taken seed by seed.
    """
    compared = compared or Compared()
    tests = _tests(values, baseline, measure, compared.left_out)
    seeds = len(values[baseline])
    open_tests = [row for row in tests if row["rule"] != baseline and not row["left_out"]]
    small = 0.01 * abs(tests[0]["value"]["mean"]) if measure.less_is_better else 0.01
    needed = _seeds_needed(open_tests, small, seeds)
    rule, sentence = _answer(tests, baseline, measure, compared, needed)
    if rule == baseline and needed is not None and needed > seeds:
        sentence += f" To see {_named(small, measure)} takes about {needed} seeds."
    return {
        "rule": rule,
        "sentence": f"{sentence} {compared.addition}".rstrip(),
        "measure": measure.name,
        "where": measure.where,
        "less_is_better": measure.less_is_better,
        "baseline": baseline,
        "seeds": seeds,
        "detectable": _least_seen(open_tests),
        "seeds_needed": needed,
        "rules": tests,
    }


def _tests(
    values: Mapping[str, Sequence[float]], baseline: str, measure: MeasuredOn, left_out: Mapping[str, str]
) -> list[TestedRule]:
    """Hold every rule against the baseline; those that are left out are shown, and take no part in the correction."""
    rules = [baseline, *(rule for rule in values if rule != baseline)]
    sign = -1.0 if measure.less_is_better else 1.0
    differences = {
        rule: [ours - theirs for ours, theirs in zip(values[rule], values[baseline], strict=True)] for rule in rules[1:]
    }
    tested = [rule for rule in rules[1:] if not left_out.get(rule)]
    raw = {rule: paired_p(differences[rule]) for rule in tested}
    adjusted = dict(zip(tested, holm([raw[rule] for rule in tested]), strict=True))
    rows: list[TestedRule] = []
    for rule in rules:
        found = estimate(differences.get(rule, []))
        spread = deviation(found.values) if rule in raw and len(found.values) > 1 else math.nan
        rows.append(
            {
                "rule": rule,
                "value": estimate(values[rule]).as_json(),
                "difference": None if rule == baseline else found.as_json(),
                "ahead": sum(sign * one > 0 for one in found.values),
                "p": raw.get(rule),
                "p_holm": adjusted.get(rule),
                "verdict": "" if rule == baseline else _verdict(found, adjusted.get(rule), sign),
                "detectable": None if math.isnan(spread) else detectable(spread, len(found.values), len(tested)),
                "left_out": left_out.get(rule, ""),
            }
        )
    return rows


def _verdict(difference: Estimate, adjusted: float | None, sign: float) -> str:
    """Say better, worse or not distinguishable; too few seeds are untested whatever p they give."""
    return verdict(sign * difference.mean, adjusted if len(difference.values) >= LEAST_SEEDS else None)


def _gain(row: TestedRule, measure: MeasuredOn) -> float:
    """Return how much better a rule is than the baseline; below 0 where it is worse."""
    assert row["difference"] is not None, "the baseline is not held against itself"
    return -row["difference"]["mean"] if measure.less_is_better else row["difference"]["mean"]


def _least_seen(rows: Sequence[TestedRule]) -> float | None:
    """Return the difference from which on every rule that may still be better would have been seen to be."""
    found = [row["detectable"] for row in rows if row["verdict"] != "worse" and row["detectable"] is not None]
    return max(found, default=None)


def _seeds_needed(rows: Sequence[TestedRule], small: float, seeds: int) -> int | None:
    """Return how many seeds a small difference needs: a point, or a hundredth of an error.

    With too few seeds the spread is not known: enough to see a difference as large as the spread itself.
    """
    if not rows:
        return None
    if seeds < LEAST_SEEDS:
        return seeds_for(1.0, 1.0, len(rows))
    spreads = [
        deviation(row["difference"]["values"]) for row in rows if row["difference"] and row["verdict"] != "worse"
    ]
    return seeds_for(small, max(spreads), len(rows)) if spreads else None


def _answer(
    rows: Sequence[TestedRule], baseline: str, measure: MeasuredOn, compared: Compared, needed: int | None
) -> tuple[str | None, str]:
    """Return the rule to use, None where none is recommended, and the sentence that says it."""
    seeds = len(rows[0]["value"]["values"])
    others = [row for row in rows if row["rule"] != baseline]
    tested = [row for row in others if not row["left_out"]]
    if compared.problem:
        return None, f"No recommendation: {compared.problem}."
    if not others:
        ended = measure.value(rows[0]["value"]["mean"])
        return None, f"{baseline} ended at {ended} {measure.where}; there is no other rule to hold it against."
    if measure.refused:
        return None, f"No recommendation: {measure.refused}."
    if not tested:
        reasons = "; ".join(f"{row['rule']}: {row['left_out']}" for row in others)
        return None, f"No recommendation: no rule is left to hold against {baseline} ({reasons})."
    if seeds < LEAST_SEEDS:
        return None, _too_few(tested, baseline, measure, f"{compared.command} --seeds {needed}")
    if compared.too_few:
        return None, f"No recommendation: {compared.too_few}."
    better = sorted((row for row in tested if row["verdict"] == "better"), key=lambda row: -_gain(row, measure))
    if len(better) > 1 and compared.cannot_choose:
        names = _listed([row["rule"] for row in better])
        return None, (
            f"No recommendation: {names} are better than {baseline} {measure.where}, and {compared.cannot_choose}."
        )
    if better:
        chosen = compared.chosen_on
        better.sort(key=lambda row: -estimate(chosen[row["rule"]]).mean if chosen else 0.0)
        how = f" {compared.choosing}" if compared.choosing and len(better) > 1 else ""
        if len(better) > 1 and compared.reported_on:
            measure = replace(measure, where=compared.reported_where)
            better[0], sure = _on_other_rows(better[0], baseline, compared.reported_on, measure)
            if not sure:
                names = _listed([row["rule"] for row in better])
                return None, (
                    f"No recommendation: of {names}, which are better than {baseline}, {better[0]['rule']} was chosen, "
                    f"and {measure.where} it is not: {_difference(better[0], measure)}."
                )
        return better[0]["rule"], _use(better, baseline, measure, compared.controls) + how
    return baseline, _keep(tested, baseline, measure, seeds)


def _on_other_rows(
    row: TestedRule, baseline: str, values: Mapping[str, Sequence[float]], measure: MeasuredOn
) -> tuple[TestedRule, bool]:
    """Return a rule that some rows chose as the others find it, and whether it is better there: one test, at 5 %."""
    pairs = zip(values[row["rule"]], values[baseline], strict=True)
    found = estimate([ours - theirs for ours, theirs in pairs])
    sign = -1.0 if measure.less_is_better else 1.0
    return {**row, "difference": found.as_json()}, verdict(sign * found.mean, paired_p(found.values)) == "better"


def _difference(row: TestedRule, measure: MeasuredOn) -> str:
    found = row["difference"]
    return show_estimate(found, 1, 100.0, signed=True) if measure.percent else show_estimate(found, 4, signed=True)


def _too_few(rows: Sequence[TestedRule], baseline: str, measure: MeasuredOn, command: str) -> str:
    best = max(rows, key=lambda row: _gain(row, measure))
    gain = _gain(best, measure)
    count = {1: "one seed", 2: "two seeds"}[len(rows[0]["value"]["values"])]
    if gain > 0:
        found = f"{best['rule']} is ahead of {baseline} by {_named(gain, measure)} {measure.where}"
    else:
        found = f"No rule is ahead of {baseline} {measure.where}"
    return f"{found}, but {count} cannot tell it from chance: {command} can."


def _named(difference: float, measure: MeasuredOn) -> str:
    """Write a difference with what it is of, where points do not say it."""
    return measure.amount(difference) if measure.percent else f"{measure.name} {measure.amount(difference)}"


def _use(better: Sequence[TestedRule], baseline: str, measure: MeasuredOn, controls: frozenset[str]) -> str:
    best, *others = better
    assert best["difference"] is not None, "a rule that is better is not the baseline"
    ends = sorted(abs(best["difference"][end]) for end in ("low", "high"))
    unit = 100.0 if measure.percent else 1.0
    low, high = (f"{unit * end:.1f}" if measure.percent else f"{end:.3g}" for end in ends)
    seeds = len(best["difference"]["values"])
    verb = f"Ask no clients ({best['rule']})" if best["rule"] in controls else f"Use {best['rule']}"
    way = "lower" if measure.less_is_better else "higher"
    text = (
        f"{verb}: {measure.name} is {measure.amount(best['difference']['mean'])} {way} than with {baseline} "
        f"{measure.where} (95 % interval {low} to {high}, {seeds} seeds)."
    )
    alike = [row["rule"] for row in others if _alike(best, row)]
    if not alike:
        return text
    return f"{text} {_listed(alike)} may be as good: {seeds} seeds cannot tell."


def _alike(best: TestedRule, other: TestedRule) -> bool:
    """Whether the seeds cannot tell another better rule from the best one."""
    pairs = zip(best["value"]["values"], other["value"]["values"], strict=True)
    p = paired_p([one - another for one, another in pairs])
    return p is None or p >= 0.05


def _keep(rows: Sequence[TestedRule], baseline: str, measure: MeasuredOn, seeds: int) -> str:
    one = rows[0]["rule"] if len(rows) == 1 else ""
    if all(row["verdict"] == "worse" for row in rows):
        return f"Keep {baseline}: with {seeds} seeds {one or 'every other rule'} is worse {measure.where}."
    open_rows = [row for row in rows if row["verdict"] != "worse"]
    if all(value == 0 for row in open_rows if row["difference"] for value in row["difference"]["values"]):
        return f"Keep {baseline}: no other rule is better, and none that is not worse differs from it in any seed."
    least = _least_seen(rows)
    assert least is not None, "a rule that was tested has a least difference"
    return (
        f"Keep {baseline}: with {seeds} seeds {f'{one} is not' if one else 'nothing is'} better {measure.where}; a "
        f"difference under {_named(least, measure)} would not have been seen."
    )


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
