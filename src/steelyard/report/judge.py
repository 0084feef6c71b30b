"""Which rule the others are held against, what the seeds say of each, and which rows may decide."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import numpy as np
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.measures import MEASURES, Measure, estimate, measure_of
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import recipes
from steelyard.experiment.recommend import RecommendDescription
from steelyard.report.curves import Curve
from steelyard.report.decide import Compared, MeasuredOn, recommend
from steelyard.report.notices import privacy_of, single_client_rounds
from steelyard.report.result import PairedTest, Recommendation, RecordedRule, RuleTests, Verdict
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


# Which rows report on a run, whether they are known to be clean, and whether they may decide.


LEAST_ROWS = 30
"""With fewer rows, one that is right by chance moves the accuracy by more than three points: they decide nothing."""


def servers_rows(history: History) -> str:
    """Return what the server's reporting rows are called: "the server's 46 rows", "the server's 429 clean rows".

    They are known to be clean where the run itself made clients flawed: the server's rows are as the source has them.
    """
    counts = sorted(set(reported(history).values()))
    number = "" if not counts else f"{counts[0]:,} " if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} "
    return f"the server's {number}{'clean ' if len(history.flaws) else ''}rows"


def reported(history: History) -> dict[str, int]:
    """Return by seed how many of the server's rows report."""
    return json.loads(history.info.get("report_rows", "{}"))


def recommendation_of(
    history: History, experiment: Description, curves: Sequence[Curve], baseline: str
) -> Recommendation:
    """Return which rule of a run to use: by the server's rows where they only report, else by the clients' tests.

    Where clients test models of their own, their tests decide: the server has not seen those models.
    """
    # One that exploded before its first test has no figures; the others are compared all the same.
    sound = [curve for curve in curves if (curve.rule, curve.seed) not in history.ended] or curves
    known = set.intersection(*(set(curve.server) for curve in sound))
    error = experiment.server_figure
    measure, on_server = _measure(history, experiment, curves, server=error in known and not history.personal)

    def value(curve: Curve) -> float:
        series = curve.server.get(error, (math.nan,)) if on_server else curve.overall
        mean = float(np.mean(series[-experiment.rounds.last :]))
        return -mean if measure.less_is_better and not on_server else mean

    values: dict[str, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: curve.seed):
        values.setdefault(curve.rule, []).append(value(curve))
    order = dict.fromkeys(curve.rule for curve in curves)
    settings = {str(row["rule"]): json.loads(row["settings"]) for row in history.federations.to_dict("records")}
    compared = Compared(
        _left_out(history, settings, by_clients=not on_server),
        _problem(history, baseline),
        frozenset(rule for rule, found in settings.items() if not asks_clients(found)),
        **_choosing(experiment, measure, curves, on_server=on_server),
        too_few=_too_few(history, measure, curves, on_server=on_server),
        addition=_spent(history),
    )
    return recommend({rule: values[rule] for rule in order}, baseline, measure, compared)


def _measure(
    history: History, experiment: Description, curves: Sequence[Curve], *, server: bool
) -> tuple[MeasuredOn, bool]:
    """Return the measure that decides, and whether it is one of the server's rows."""
    main = measure_of(experiment.server_figure if experiment.regression else experiment.score_name)
    chose, dealt = _rows_that_chose(experiment)
    rows = sorted({int(curve.rows.sum()) for curve in curves})
    tested = rows[-1] > 0
    by_server = server and (not chose or not tested or dealt)
    why = "the rows that report also weighed the clients (partition.server_report = 'same'; 'apart' keeps others)"
    refused = why if chose and (by_server or dealt) else ""
    if by_server:
        return MeasuredOn(main.name, f"on {servers_rows(history)}", main.less_is_better, refused), True
    count = f"{rows[0]:,}" if rows[0] == rows[-1] else f"{rows[0]:,} to {rows[-1]:,}"
    own = "validation" if experiment.validation is not None else "test"
    where = (
        f"over {count} users" if isinstance(experiment, RecommendDescription) else f"on the clients' {count} {own} rows"
    )
    return MeasuredOn(main.name, where, main.less_is_better, refused), False


def _rows_that_chose(experiment: Description) -> tuple[bool, bool]:
    """Say whether the server's reporting rows also weighed clients, and whether the clients' tests are those rows."""
    if not isinstance(experiment, LearningDescription):
        return False, False
    part = experiment.partition
    same = part.server_report == "same"
    return same, same and part.server == "held-out" and part.test == "held-out"


def _too_few(history: History, measure: MeasuredOn, curves: Sequence[Curve], *, on_server: bool) -> str:
    rows = min(reported(history).values(), default=0) if on_server else min(int(curve.rows.sum()) for curve in curves)
    few = measure_of(measure.name).bounded and 0 < rows < LEAST_ROWS
    return f"{rows} rows are too few to report on rules ({LEAST_ROWS} at least)" if few else ""


class _Choosing(TypedDict, total=False):
    chosen_on: Mapping[str, Sequence[float]]
    choosing: str
    reported_on: Mapping[str, Sequence[float]]
    reported_where: str
    cannot_choose: str


def _choosing(experiment: Description, measure: MeasuredOn, curves: Sequence[Curve], *, on_server: bool) -> _Choosing:
    """Say which rows choose among rules that are better: the clients' own tests, where the server's rows report.

    A rule counts by its median client, so that fewer than half of the clients, whose rows may be wrong, decide nothing.
    Without rows at the server, every other client chooses and the rest report. Where neither can be, a recipe of a
    paper keeps to the paper and says so; anything else chooses nothing.
    """
    rows = min(int(curve.rows.sum()) for curve in curves)
    last = experiment.rounds.last
    if on_server and rows >= LEAST_ROWS:
        return {"chosen_on": _by_clients(curves, last), "choosing": f"The clients' {rows:,} test rows chose it."}
    if experiment.name in recipes():
        return {"choosing": "The rows that report chose it too, as in the paper."}
    if not on_server and measure.percent and (halves := _halves(curves, last)):
        return halves
    if on_server and rows:
        why = f"the clients' {rows:,} test rows are too few to choose one of them ({LEAST_ROWS} at least)"
    else:
        why = (
            f"no other rows choose one of them: {LEAST_ROWS} test rows in either half of the clients would, or "
            "partition.server_report = 'apart'"
        )
    return {"cannot_choose": why}


def _by_clients(curves: Sequence[Curve], last: int, every: slice = slice(None)) -> dict[str, list[float]]:
    """Return for each rule and seed how its last rounds' models did at the median client of some."""
    values: dict[str, list[float]] = {}
    for curve in curves:
        found = curve.scores[-last:, every].mean(axis=0)
        values.setdefault(curve.rule, []).append(float(np.median(found)))
    return values


def _halves(curves: Sequence[Curve], last: int) -> _Choosing:
    """Let every other client choose and the rest report; empty where either half has too few rows."""
    reports, chooses = slice(0, None, 2), slice(1, None, 2)
    rows = [min(int(curve.rows[half].sum()) for curve in curves) for half in (reports, chooses)]
    if min(rows) < LEAST_ROWS:
        return {}
    values: dict[str, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: curve.seed):
        found = curve.scores[-last:, reports].mean(axis=0) @ curve.rows[reports] / curve.rows[reports].sum()
        values.setdefault(curve.rule, []).append(float(found))
    return {
        "chosen_on": _by_clients(curves, last, chooses),
        "choosing": f"The {rows[1]:,} test rows of the other clients chose it.",
        "reported_on": values,
        "reported_where": f"on the {rows[0]:,} test rows of every other client",
    }


def _left_out(history: History, settings: Mapping[str, RecordedRule], *, by_clients: bool) -> dict[str, str]:
    """Return by rule why it is not recommended: its model exploded, or the clients' test rows chose its order."""
    found: dict[str, str] = {}
    if by_clients:
        adjusted = [rule for rule, given in settings.items() if given.get("adjust")]
        found |= dict.fromkeys(adjusted, "the rows that report also chose its order")
    seeds = len(history.federations["seed"].unique())
    for rule in settings:
        ended = sum(name == rule for name, _ in history.ended)
        if ended:
            found[rule] = f"its model exploded in {ended} of {seeds} seeds"
    return found


def _problem(history: History, baseline: str) -> str:
    status = history.info.get("status", "unknown")
    if status != "finished":
        last = max(history.last_round, 0)
        planned = f" of {history.info['rounds']}" if "rounds" in history.info else ""
        return f"the run is {status}, after round {last}{planned}"
    ended = [seed for rule, seed in history.ended if rule == baseline]
    if ended:
        count = len(history.federations["seed"].unique())
        return f"{baseline}, which the others are held against, exploded in {len(ended)} of {count} seeds"
    single = [row for row in single_client_rounds(history) if row["rounds"] == row["of"]]
    return "rounds weighed one client only, and no rule can prefer one client to another there" if single else ""


def _spent(history: History) -> str:
    """Say what a comparison of private rules cost the clients; each of them learnt from the same data."""
    promise = privacy_of(history)
    if promise is None or len(promise["epsilon"]) < 2:
        return ""
    return f"Comparing spent ε {promise['together']:.3g} of any one client's privacy, all rules together."
