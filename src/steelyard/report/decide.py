"""Which rule to use: decided once, as numbers (`decide`), and said once, in words (`say`).

A rule is recommended in place of the baseline if it is better over at least three seeds (paired t-test, p < 0.05 after
Holm's correction over all rules that are compared). If none is, the baseline is kept, and the sentence says which
difference may go undetected: one that this test detects less than four times of five. Rows that chose something
about a rule, its order or its clients' weights, do not decide, and which of several better rules is recommended is
chosen by rows that do not report: docs/reference/experiments.md has the conditions.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from pydantic import computed_field

from steelyard.base.documents import Document
from steelyard.base.measures import (
    LEAST_ROWS,
    Estimate,
    Measure,
    deviation,
    estimate,
    measure_of,
    show_estimate,
    wilson_difference,
)
from steelyard.experiment.description import Description
from steelyard.experiment.loading import RUN_FILE, recipes
from steelyard.report.curves import Curve, Recorded, find_baseline
from steelyard.report.statistics import LEAST_SEEDS, detectable, paired_p, paired_tests, seeds_for, verdict

Values = Mapping[str, Sequence[float]]
"""By rule: a value for each seed, the seeds in the same order for every rule."""


class Answer(StrEnum):
    """What a comparison comes to."""

    USE = "use"
    """A rule is better than the baseline."""
    KEEP = "keep"
    """None is: the baseline is kept."""
    ALONE = "alone"
    """There is one rule only."""
    TOO_FEW_SEEDS = "too few seeds"
    CANNOT_CHOOSE = "cannot choose"
    """Several rules are better, and no other rows choose one of them."""
    UNCONFIRMED = "unconfirmed"
    """Of several better rules one was chosen, and other rows do not find it better."""
    AT_CHANCE = "at chance"
    """No rule's model does better than guessing."""
    REFUSED = "refused"
    """Nothing may be recommended, for the `reason`."""


class TestedRule(Document):
    """A rule in the measure that decides: its value, and the paired test against the baseline."""

    rule: str
    value: Estimate
    difference: Estimate | None = None
    """None for the baseline."""
    ahead: int = 0
    """In how many seeds it is better."""
    p: float | None = None
    p_holm: float | None = None
    verdict: str = ""
    detectable: float | None = None
    left_out: str = ""
    """Why it is not recommended whatever its figures say."""


class Outcome(Document):
    """What the tests of a comparison come to."""

    answer: Answer
    rule: str | None = None
    """The rule to use: the baseline where it is kept, None where nothing is recommended."""
    better: tuple[str, ...] = ()
    """The rules that are better than the baseline, the chosen one first; of too few seeds the one that is ahead."""
    alike: tuple[str, ...] = ()
    """Those of them that may be as good."""
    difference: Estimate | None = None
    """By how much the first of them differs from the baseline, on the rows that did not choose it."""
    on_samples: tuple[float, ...] = ()
    """Of too few seeds: the 95 % interval of this difference over the test samples alone, if these give one."""
    reported: str = ""
    """Which rows those are, where they are not `where`."""
    reason: str = ""
    """Why nothing is recommended, or a sentence on the rows that chose."""


class Verdict(Outcome):
    """Which rule to use, and the tests behind it; `report.decide` decides and says it."""

    measure: str
    where: str
    """On which samples, as the end of a sentence: "on the server's 46 test samples"."""
    less_is_better: bool
    baseline: str
    seeds: int
    small: float
    """A difference that counts as small: a point, or a hundredth of an error."""
    detectable: float | None
    """The least difference that would have been seen."""
    seeds_needed: int | None
    """How many seeds a small difference needs; None where a thousand are too few."""
    asks_nobody: bool
    """Whether the rule to use asks no clients."""
    command: str
    """What to run for enough seeds, as a shell takes it; empty where there are enough."""
    spent: float | None
    """The ε that comparing has cost any one client."""
    rules: tuple[TestedRule, ...]
    """Every rule, the baseline first."""

    @computed_field
    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return say(self)


@dataclass(frozen=True)
class Rows:
    """By what rules are compared, on which rows, and which other rows may choose one of several better rules."""

    measure: Measure
    where: str
    """Which samples report, as the end of a sentence: "on the server's 46 test samples"."""
    count: int = 0
    """How many they are; 0 where that is not known."""
    refused: str = ""
    """Why these rows decide nothing; empty where they may."""
    chosen_on: Values = field(default_factory=dict[str, Sequence[float]])
    """Values on rows that do not report, more is better; of several better rules they choose one."""
    choosing: str = ""
    """Which rows those are, or, where the rows that report choose as well, a sentence that says so."""
    reported_on: Values = field(default_factory=dict[str, Sequence[float]])
    """Values on the rows that did not choose, where these are not all of the rows."""
    reported_where: str = ""
    """Which rows those are, as the end of a sentence."""
    cannot_choose: str = ""
    """Why no rule of several better ones may be chosen; empty where one may."""


@dataclass(frozen=True)
class Exclusions:
    """What a rule, or the comparison as a whole, has against being recommended."""

    rules: Mapping[str, str] = field(default_factory=dict[str, str])
    """By rule: why it is not recommended whatever its figures say."""
    problem: str = ""
    """Why nothing is recommended at all, such as a run that goes on."""
    at_chance: str = ""
    """What guessing reaches, where no rule does better: "guessing one of 10 classes: 10.0%"."""


def decide(
    values: Values,
    baseline: str,
    rows: Rows,
    exclusions: Exclusions | None = None,
    *,
    controls: Sequence[str] = (),
    command: str = "",
    spent: float | None = None,
) -> Verdict:
    """Return which rule to use, from one value for each rule and seed, and the tests behind it.

    Differences are taken seed by seed. `controls` are rules that ask no clients, `command` is what runs them again, for
    more seeds, and `spent` is the ε that comparing has cost.
    """
    exclusions = exclusions or Exclusions()
    tests = _tests(values, baseline, rows.measure, exclusions.rules)
    seeds = len(values[baseline])
    tested = [row for row in tests[1:] if not row.left_out]
    small = 0.01 * abs(tests[0].value.mean) if rows.measure.less_is_better else 0.01
    outcome, needed = _outcome(tests, tested, rows, exclusions, seeds), _seeds_needed(tested, small, seeds)
    return Verdict(
        **dict(outcome),
        measure=rows.measure.name,
        where=rows.where,
        less_is_better=rows.measure.less_is_better,
        baseline=baseline,
        seeds=seeds,
        small=small,
        detectable=_least_seen(tested),
        seeds_needed=needed,
        asks_nobody=outcome.rule in controls,
        command=f"{command} --seeds {needed}" if outcome.answer is Answer.TOO_FEW_SEEDS else "",
        spent=spent,
        rules=tests,
    )


def _outcome(
    tests: Sequence[TestedRule], tested: Sequence[TestedRule], rows: Rows, exclusions: Exclusions, seeds: int
) -> Outcome:
    """Return what a comparison comes to: `tests` are of all rules, the baseline first, `tested` those that may win."""
    baseline, *others = tests
    if exclusions.problem:
        return Outcome(answer=Answer.REFUSED, reason=exclusions.problem)
    if exclusions.at_chance:
        return Outcome(answer=Answer.AT_CHANCE, reason=exclusions.at_chance)
    if not others:
        return Outcome(answer=Answer.ALONE)
    if rows.refused:
        return Outcome(answer=Answer.REFUSED, reason=rows.refused)
    if not tested:
        reasons = "; ".join(f"{row.rule}: {row.left_out}" for row in others)
        return Outcome(answer=Answer.REFUSED, reason=f"no rule is left to compare with {baseline.rule} ({reasons})")
    if seeds < LEAST_SEEDS:
        best = max(tested, key=lambda row: _gain(row, rows.measure))
        known = rows.measure.of_rows and rows.count > 0
        over = wilson_difference(best.value.mean, baseline.value.mean, rows.count) if known else ()
        return Outcome(answer=Answer.TOO_FEW_SEEDS, better=(best.rule,), difference=best.difference, on_samples=over)
    better = sorted((row for row in tested if row.verdict == "better"), key=lambda row: -_gain(row, rows.measure))
    if not better:
        return Outcome(answer=Answer.KEEP, rule=baseline.rule)
    names = tuple(row.rule for row in better)
    if len(better) == 1:
        return Outcome(answer=Answer.USE, rule=names[0], better=names, difference=better[0].difference)
    if rows.cannot_choose:
        return Outcome(answer=Answer.CANNOT_CHOOSE, better=names, reason=rows.cannot_choose)
    if rows.chosen_on:
        better.sort(key=lambda row: -estimate(rows.chosen_on[row.rule]).mean)
    best, *rest = better
    outcome = Outcome(
        answer=Answer.USE,
        rule=best.rule,
        better=tuple(row.rule for row in better),
        alike=tuple(row.rule for row in rest if _alike(best, row)),
        difference=best.difference,
        reason=rows.choosing,
        reported=rows.reported_where,
    )
    if not rows.reported_on:
        return outcome
    # What some rows chose counts as the others find it: one test, at 5 %.
    found = _differences(rows.reported_on, best.rule, baseline.rule)
    sign = -1.0 if rows.measure.less_is_better else 1.0
    sure = verdict(sign * found.mean, paired_p(found.values)) == "better"
    unsure = {} if sure else {"answer": Answer.UNCONFIRMED, "rule": None}
    return outcome.model_copy(update={"difference": found, **unsure})


def _differences(values: Values, rule: str, baseline: str) -> Estimate:
    return estimate([ours - theirs for ours, theirs in zip(values[rule], values[baseline], strict=True)])


def _tests(values: Values, baseline: str, measure: Measure, left_out: Mapping[str, str]) -> tuple[TestedRule, ...]:
    """Hold every rule against the baseline; those that are left out are shown, and take no part in the correction."""
    rules = [rule for rule in values if rule != baseline]
    sign = -1.0 if measure.less_is_better else 1.0
    differences = {rule: _differences(values, rule, baseline) for rule in rules}
    tests = paired_tests(
        {rule: [sign * one for one in found.values] for rule, found in differences.items() if not left_out.get(rule)}
    )
    rows = [TestedRule(rule=baseline, value=estimate(values[baseline]), left_out=left_out.get(baseline, ""))]
    for rule, found in differences.items():
        test, seeds = tests.get(rule), len(found.values)
        rows.append(
            TestedRule(
                rule=rule,
                value=estimate(values[rule]),
                difference=found,
                ahead=sum(sign * one > 0 for one in found.values),
                p=test and test.p,
                p_holm=test and test.p_holm,
                # Too few seeds are untested whatever p they give.
                verdict=test.verdict if test and seeds >= LEAST_SEEDS else "untested",
                detectable=detectable(deviation(found.values), seeds, len(tests)) if test and seeds > 1 else None,
                left_out=left_out.get(rule, ""),
            )
        )
    return tuple(rows)


def _gain(row: TestedRule, measure: Measure) -> float:
    """Return how much better a rule is than the baseline; below 0 where it is worse."""
    assert row.difference is not None, "the baseline is not held against itself"
    return -row.difference.mean if measure.less_is_better else row.difference.mean


def _least_seen(rows: Sequence[TestedRule]) -> float | None:
    """Return the difference from which on every rule that may still be better would have been seen to be."""
    return max((row.detectable for row in rows if row.verdict != "worse" and row.detectable is not None), default=None)


def _seeds_needed(rows: Sequence[TestedRule], small: float, seeds: int) -> int | None:
    """Return how many seeds a small difference needs: a point, or a hundredth of an error.

    With too few seeds the spread is not known: enough to see a difference as large as the spread itself.
    """
    if not rows:
        return None
    if seeds < LEAST_SEEDS:
        return seeds_for(1.0, 1.0, len(rows))
    spreads = [deviation(row.difference.values) for row in rows if row.difference and row.verdict != "worse"]
    return seeds_for(small, max(spreads), len(rows)) if spreads else None


def _alike(best: TestedRule, other: TestedRule) -> bool:
    """Whether the seeds cannot tell another better rule from the best one."""
    pairs = zip(best.value.values, other.value.values, strict=True)
    p = paired_p([one - another for one, another in pairs])
    return p is None or p >= 0.05


# The sentence.


def say(found: Verdict) -> str:
    """Return a verdict as one or two sentences: for the terminal, the report, the page, attacks and the arena alike."""
    sentence = _SAID[found.answer](found, measure_of(found.measure))
    spent = "" if found.spent is None else f"Comparing spent ε {found.spent:.3g}, all rules together."
    return f"{sentence} {spent}".rstrip()


def more_seeds(found: Verdict | None) -> list[str]:
    """Return the line that says what to run for enough seeds; nothing where there are enough."""
    return [f"more seeds: {found.command}"] if found and found.command else []


def _refused(found: Verdict, measure: Measure) -> str:
    return f"No recommendation: {found.reason}."


def _at_chance(found: Verdict, measure: Measure) -> str:
    best = max(found.rules, key=lambda row: (-1 if found.less_is_better else 1) * row.value.mean)
    reached = f"{_written(best.value.mean, measure)} with {best.rule}"
    return (
        f"No recommendation: no rule does better than chance {found.where} (best: {reached}; {found.reason}). Lower "
        "training.learning_rate, run more rounds, or check the labels."
    )


def _alone(found: Verdict, measure: Measure) -> str:
    shown = _written(found.rules[0].value.mean, measure)
    return f"{found.baseline} reached {shown} {found.where}. The run has no other rule to compare it with."


def _too_few_seeds(found: Verdict, measure: Measure) -> str:
    assert found.difference is not None, "the best of the other rules has a difference"
    (best,), mean = found.better, found.difference.mean
    said = f"No rule is ahead of {found.baseline} {found.where}."
    if (-mean if found.less_is_better else mean) > 0:
        said = f"{best} is ahead of {found.baseline} by {_named(mean, measure)} {found.where}{_over(found, measure)}."
    count = {1: "One seed is", 2: "Two seeds are"}[found.seeds]
    return f"{said} {count} too few to test whether another split of the data agrees; {found.seeds_needed} are enough."


def _over(found: Verdict, measure: Measure) -> str:
    """Return how sure the samples themselves make a difference, for the middle of a sentence."""
    if not found.on_samples:
        return ""
    low, high = (f"{measure.factor * end:.1f}".replace("-", "−") for end in found.on_samples)
    unsure = "; these samples alone do not rule out chance" if found.on_samples[0] <= 0 else ""
    return f" (95% interval over these samples {low} to {high}{unsure})"


def _cannot_choose(found: Verdict, measure: Measure) -> str:
    better = f"{_listed(found.better)} are better than {found.baseline} {found.where}"
    return f"No recommendation: {better}, and {found.reason}."


def _unconfirmed(found: Verdict, measure: Measure) -> str:
    digits, factor = (1, 100.0) if measure.percent else (4, 1.0)
    return (
        f"No recommendation: of {_listed(found.better)}, which are better than {found.baseline}, {found.better[0]} was "
        f"chosen, and {found.reported} it is not: {show_estimate(found.difference, digits, factor, signed=True)}."
    )


def _use(found: Verdict, measure: Measure) -> str:
    assert found.difference is not None, "a rule that is better is not the baseline"
    ends = sorted(abs(measure.factor * end) for end in (found.difference.low, found.difference.high))
    low, high = (f"{end:.1f}" if measure.percent else f"{end:.3g}" for end in ends)
    verb = f"Ask no clients ({found.rule})" if found.asks_nobody else f"Use {found.rule}"
    way = "lower" if found.less_is_better else "higher"
    parts = [
        f"{verb}: {measure.name} is {amount(found.difference.mean, measure)} {way} than with {found.baseline} "
        f"{found.reported or found.where} (95% confidence interval {low} to {high}, {found.seeds} seeds).",
        _undecided(found),
        found.reason,
    ]
    return " ".join(filter(None, parts))


def _undecided(found: Verdict) -> str:
    """Name the better rules that the tests do not tell from the one that is recommended."""
    if not found.alike:
        return ""
    verb = "does" if len(found.alike) == 1 else "do"
    return f"{_listed(found.alike)} {verb} not differ significantly from it."


def _keep(found: Verdict, measure: Measure) -> str:
    tested = [row for row in found.rules[1:] if not row.left_out]
    one = tested[0].rule if len(tested) == 1 else ""
    open_rows = [row for row in tested if row.verdict != "worse"]
    if not open_rows:
        said = f"with {found.seeds} seeds {one or 'every other rule'} is worse {found.where}."
    elif not any(value for row in open_rows if row.difference for value in row.difference.values):
        said = "no other rule is better, and those that are not worse give the same result in every seed."
    else:
        assert found.detectable is not None, "a rule that was tested has a least difference"
        said = (
            f"with {found.seeds} seeds {f'{one} is not' if one else 'no rule is'} significantly better {found.where}. "
            f"A difference below {_named(found.detectable, measure)} may go undetected (80% power)."
        )
    needed = found.seeds_needed or 0
    more = f" To detect {_named(found.small, measure)}, run about {needed} seeds." if needed > found.seeds else ""
    return f"Keep {found.baseline}: {said}{more}"


_SAID = {
    Answer.REFUSED: _refused,
    Answer.AT_CHANCE: _at_chance,
    Answer.ALONE: _alone,
    Answer.TOO_FEW_SEEDS: _too_few_seeds,
    Answer.CANNOT_CHOOSE: _cannot_choose,
    Answer.UNCONFIRMED: _unconfirmed,
    Answer.USE: _use,
    Answer.KEEP: _keep,
}


def _written(value: float, measure: Measure) -> str:
    return f"{value:.1%}" if measure.percent else f"{measure.name} {value:.4g}"


def amount(difference: float, measure: Measure) -> str:
    """Write how large a difference is, without its sign."""
    size = abs(measure.factor * difference)
    if not measure.percent:
        return f"{size:.3g}"
    shown = f"{size:.1f}" if size >= 0.095 or size < 1e-9 else f"{size:.1g}"
    return "1 point" if shown == "1.0" else f"{shown} points"


def _named(difference: float, measure: Measure) -> str:
    """Write a difference with what it is of, where points do not say it."""
    return amount(difference, measure) if measure.percent else f"{measure.name} {amount(difference, measure)}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


# What decides in a run: which rows report, whether they are known to be clean, which may choose.


def verdict_of(run: Recorded, experiment: Description) -> Verdict:
    """Return which rule of a run to use: by the server's rows where they only report, else by the clients' tests.

    Where clients test models of their own, their tests decide: the server has not seen those models.
    """
    history, curves = run.history, run.curves
    # One that exploded before its first test has no figures; the others are compared all the same.
    sound = [curve for curve in curves if (curve.rule, curve.seed) not in history.ended] or curves
    known = set.intersection(*(set(curve.server) for curve in sound))
    error, last = experiment.server_figure, experiment.rounds.last
    on_server, rows = _rows(run, experiment, server=error in known and not history.personal)

    def value(curve: Curve) -> float:
        series = curve.server.get(error, (math.nan,)) if on_server else curve.overall
        mean = float(np.mean(series[-last:]))
        return -mean if rows.measure.less_is_better and not on_server else mean

    promise, values = history.facts.privacy, _by_rule(curves, value)
    chance = _chance(run, rows, values, last)
    return decide(
        values,
        run.baseline,
        rows,
        Exclusions(_left_out(run, by_clients=not on_server), _problem(run), chance),
        controls=[curve.rule for curve in curves if not curve.settings.asks_clients],
        command=_again(run),
        # Each of the private rules learnt from the same data.
        spent=None if promise is None or len(promise.epsilon) < 2 else promise.together,
    )


def _again(run: Recorded) -> str:
    """Return the command that compares the rules of a run anew, as a shell takes it."""
    held = [] if find_baseline(run.history, None) == run.baseline else ["--baseline", run.baseline]
    return shlex.join(["steelyard", "compare", str(run.history.folder / RUN_FILE), "--rules", "recipe", *held])


def _by_rule(curves: Sequence[Curve], figure: Callable[[Curve], float]) -> dict[str, list[float]]:
    """Return a figure of every curve, by rule, in the order in which the run lists rules; seeds rise."""
    values: dict[str, list[float]] = {curve.rule: [] for curve in curves}
    for curve in sorted(curves, key=lambda curve: curve.seed):
        values[curve.rule].append(figure(curve))
    return values


def _rows(run: Recorded, experiment: Description, *, server: bool) -> tuple[bool, Rows]:
    """Return whether the server's rows decide, and the rows by which rules are compared."""
    measure = measure_of(experiment.server_figure if experiment.regression else experiment.score_name)
    tested = [int(curve.rows.sum()) for curve in run.curves]
    chose, dealt = experiment.rows_that_chose
    by_server = server and (not chose or not any(tested) or dealt)
    few = min(run.history.facts.report_rows.values(), default=0) if by_server else min(tested)
    refused = ""
    if chose and (by_server or dealt):
        refused = "the server's test samples also weighted the clients. Set partition.server_report = 'apart'"
    elif measure.bounded and 0 < few < LEAST_ROWS:
        more = _larger(experiment, "server_fraction" if by_server else "test_fraction", few)
        refused = f"{few} test samples are too few to compare rules ({LEAST_ROWS} at least){more}"
    where = f"on {run.server_rows}"
    if not by_server:
        count = f"{min(tested):,}" if min(tested) == max(tested) else f"{min(tested):,} to {max(tested):,}"
        own = "validation" if experiment.validation is not None else "test"
        where = f"over {count} users" if experiment.lists else f"on the clients' {count} {own} samples"
    rows = Rows(measure, where, few, refused)
    return by_server, _with_choice(rows, experiment, run.curves, min(tested), by_server=by_server)


def _larger(experiment: Description, field: str, samples: int) -> str:
    """Return the share of the rows that would give enough test samples, to end a sentence; empty if none does."""
    section = experiment.model_dump(include={"partition"}).get("partition", {})
    given = {"server_fraction": section.get("server") == "fraction", "test_fraction": section.get("test") == "local"}
    # One row more than the share that would just do: shares are rounded to whole rows, client by client.
    share = math.ceil(100 * section[field] * (LEAST_ROWS + 1) / samples) / 100 if given[field] else 1.0
    return f"; set partition.{field} = {share:g}" if share <= 0.5 else ""


def _with_choice(rows: Rows, experiment: Description, curves: Sequence[Curve], tested: int, *, by_server: bool) -> Rows:
    """Add which rows choose among rules that are better: the clients' own tests, where the server's rows report.

    A rule counts by its median client, so that fewer than half of the clients, whose rows may be wrong, decide nothing.
    Without rows at the server, every other client chooses and the rest report. Where neither can be, a recipe of a
    paper keeps to the paper and says so; anything else chooses nothing.
    """
    last = experiment.rounds.last

    def median(every: slice) -> dict[str, list[float]]:
        return _by_rule(curves, lambda curve: float(np.median(curve.scores[-last:, every].mean(axis=0))))

    if by_server and tested >= LEAST_ROWS:
        return replace(rows, chosen_on=median(slice(None)), choosing=_CHOSE.format(f"{tested:,} client test samples"))
    if experiment.name in recipes():
        return replace(rows, choosing="The same samples also chose it, as in the paper.")
    reports, chooses = slice(0, None, 2), slice(1, None, 2)
    reporting, choosing = (min(int(curve.rows[half].sum()) for curve in curves) for half in (reports, chooses))
    if not by_server and rows.measure.percent and min(reporting, choosing) >= LEAST_ROWS:

        def mean(curve: Curve) -> float:
            scores, weights = curve.scores[-last:, reports].mean(axis=0), curve.rows[reports]
            return float(scores @ weights / weights.sum())

        return replace(
            rows,
            chosen_on=median(chooses),
            choosing=_CHOSE.format(f"{choosing:,} test samples of the other clients"),
            reported_on=_by_rule(curves, mean),
            reported_where=f"on the {reporting:,} test samples of every other client",
        )
    if by_server and tested:
        why = f"the clients' {tested:,} test samples are too few to choose one of them ({LEAST_ROWS} at least)"
    else:
        why = (
            f"no other samples choose one of them: {LEAST_ROWS} test samples in either half of the clients would, or "
            "partition.server_report = 'apart'"
        )
    return replace(rows, cannot_choose=why)


_CHOSE = "Of the better rules, it serves the median client best ({})."


def _left_out(run: Recorded, *, by_clients: bool) -> dict[str, str]:
    """Return by rule why it is not recommended: its model exploded, or the clients' test rows chose its order."""
    history, adjusted = run.history, [curve.rule for curve in run.curves if by_clients and curve.settings.adjust]
    found = dict.fromkeys(adjusted, "the test samples also chose its order")
    seeds = history.federations["seed"].nunique()
    ended = Counter(rule for rule, _ in history.ended)
    return found | {rule: f"its training diverged in {count} of {seeds} seeds" for rule, count in ended.items()}


def _chance(run: Recorded, rows: Rows, values: Values, last: int) -> str:
    """Return what guessing reaches where no rule does better by a standard error; empty where one does.

    Of classes that are not alike, guessing the commonest does better than this: nothing is said of such a model.
    """
    measure, best = rows.measure, max(float(np.mean(each)) for each in values.values())
    if measure.of_rows:
        counts = [each for clients in run.history.facts.labels.values() for each in clients.values()]
        guess = 1 / max(map(len, counts), default=1)
        error = math.sqrt(guess * (1 - guess) / rows.count) if rows.count else 0.0
        return f"guessing one of {1 / guess:.0f} classes: {guess:.1%}" if best <= guess + error and guess < 1 else ""
    if measure.name == "C-index":
        return "a random order: 0.5" if best <= 0.5 else ""
    fits = [np.mean(curve.server["r2"][-last:]) for curve in run.curves if "r2" in curve.server]
    return "predicting the mean is as good" if fits and max(fits) <= 0 else ""


def _problem(run: Recorded) -> str:
    history, baseline = run.history, run.baseline
    facts = history.facts
    if facts.status != "finished":
        last = max(history.last_round, 0)
        planned = "" if facts.rounds is None else f" of {facts.rounds}"
        return f"the run is {facts.status}, after round {last}{planned}"
    if ended := sum(rule == baseline for rule, _ in history.ended):
        count = history.federations["seed"].nunique()
        return f"training with {baseline}, the baseline, diverged in {ended} of {count} seeds"
    single = [row for row in run.weighed_one if row.rounds == row.of]
    return "every round weighted one client only, so that all rules are the same" if single else ""
