"""A result as tables: which rule to use and the table behind it, the papers' tables, one comparison at several shares.

A table of rules is a list of columns, each a heading and what it shows of a rule; the figures of `report.statistics`
that name a table are its columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from steelyard.base.errors import counted, listed, printable
from steelyard.base.measures import FEWEST, UNKNOWN, Estimate, Measure, estimate, measure_of, show_estimate, show_number
from steelyard.report.curves import Chain, Curve, SingleClient
from steelyard.report.decide import Answer, Verdict, more_seeds
from steelyard.report.rendering import Block, Copied, Table, as_csv, spark
from steelyard.report.result import ClientScore, Comparison, RuleResult, TargetTable
from steelyard.report.statistics import (
    COUNT,
    FIGURES,
    LEAST_SEEDS,
    MOST_SEEDS,
    FigureOfMerit,
    OnRows,
    rounds_to_target,
)
from steelyard.rounds.progress import RAISE
from steelyard.runs.facts import Promise

F1_ROUNDS = 6
"""Rounds that the table of macro F1 shows."""
MOST_CLIENTS = 20
"""Clients up to which each has a line of its own."""
MOST_NAMED = 3
"""Clients that one sentence names."""
MOST_CLASSES = 20
"""Classes up to which each has a column of its own."""


class Column(NamedTuple):
    """A column of a table of rules: its heading, and what it shows of a rule."""

    heading: str
    cell: Callable[[RuleResult], str]


def rule_table(
    title: str, rules: Sequence[RuleResult], columns: Sequence[Column], note: str = "", *, best: str | None = None
) -> Table:
    """Lay rules out, one a line; a column that has nothing to show of any rule is left out."""
    cells = {column.heading: [column.cell(rule) for rule in rules] for column in columns}
    shown = {heading: column for heading, column in cells.items() if set(column) - {UNKNOWN, ""}}
    names = [rule.rule for rule in rules]
    rows = zip(names, *shown.values(), strict=True)
    marked = names.index(best) if best in names and len(names) > 1 else None
    return Table(title, ("rule", *shown), tuple(rows), note, best=marked)


def ranks_lists(measure: str) -> bool:
    """Whether scores are of recommenders' lists: their measures are named with a cutoff, such as ndcg@10."""
    return "@" in measure


def cell(value: Estimate | None, digits: int = 1, factor: float = 1.0) -> str:
    """Write an estimate as "mean±half", or the mean alone for one seed; counts of one seed without digits."""
    counted = value is not None and len(value.values) == 1 and digits == 1 and factor == 1.0 and value.mean.is_integer()
    return show_estimate(value, 0 if counted else digits, factor, between="±")


def on_cell(rows: OnRows, measure: Measure) -> str:
    """Write the interval that a score has from its rows, and whether these are too few: "[21–94] too few"."""
    return f"{measure.show_interval(rows.low, rows.high)}{' too few' if rows.too_few else ''}"


def figure_column(
    figure: FigureOfMerit, score: Measure, place: Literal["main", "clients", "server"], heading: str = ""
) -> Column:
    """Return a figure as a column of one of the tables."""
    measure = figure.measure or score
    digits = 1 if measure is COUNT else (1 if place == "main" else 2) if measure.percent else 4
    if place == "server" and not measure.percent:
        digits = 3 if measure.bounded else 2
    own = heading or figure.heading
    return Column(
        own if place == "server" or not measure.percent else f"{own} (%)",
        lambda rule: cell(rule.figures.get(figure.name), digits, measure.factor),
    )


def _common(document: Comparison) -> list[Column]:
    """Return what is said of a rule beside figures: its algorithm, and whose models its clients tested."""
    algorithms = {rule.algorithm for rule in document.rules} != {"fedavg"}
    own = any(rule.own_models for rule in document.rules)
    return [
        Column("algorithm", lambda rule: rule.algorithm if algorithms else ""),
        Column("tested", lambda rule: "" if not own else "own models" if rule.own_models else "global model"),
    ]


# What a reader must know beside figures, in lines.


def chain_line(chain: Chain) -> str:
    """Return one line on a chain: the warning, or the final hash; empty before the first checkpoint."""
    if chain.problem:
        return f"MODIFIED since it was written: {printable(chain.problem)}; figures show the modified data"
    return f"final hash (round {chain.round}): {chain.closing}" if chain.head else ""


def chain_lines(chain: Chain) -> list[Copied]:
    """Return `chain_line` for a terminal, which does not break it; nothing before the first checkpoint.

    The hash has a line of its own: it has 64 letters, and who keeps it copies that line.
    """
    if chain.problem or not chain.head:
        return [Copied(line)] if (line := chain_line(chain)) else []
    return [Copied(f"final hash (round {chain.round}):"), Copied(chain.closing)]


def single_client_lines(found: Sequence[SingleClient]) -> list[str]:
    """Return what a reader must know of such rounds: one sentence for all rules and seeds, or none."""
    if not found:
        return []
    most = max(found, key=lambda row: row.rounds / row.of)
    more = f", and so did {len(found) - 1} more of the rules and seeds" if len(found) > 1 else ""
    return [
        f"Warning: {most.rounds} of {most.of} rounds of {most.rule}, seed {most.seed}, weighted one client "
        f"only{more}: these rounds cannot compare rules. {RAISE}"
    ]


NAMED_CLIENTS = 20
"""Clients whose ε a line names; the record of the run has all."""


def privacy_lines(promise: Promise | None) -> list[str]:
    """Return one line for each rule, and one for all of them together where there are several."""
    if promise is None:
        return []
    budget = "" if promise.budget is None else f" of {promise.budget:g}"
    where = "noise in every local step" if promise.model == "records" else f"{promise.model} differential privacy"
    unit = "sample" if promise.model == "records" else "client"
    terms = f"at δ = {promise.delta:g} ({unit}-level, {promise.neighbours}; {where}, {promise.accountant})"
    ended = {
        name: f"; stopped after round {round}, another would pass the budget" for name, round in promise.ended.items()
    }
    spent = {name: f"ε {value:.4g}{budget} {terms}{ended.get(name, '')}" for name, value in promise.epsilon.items()}
    one = len(spent) == 1
    lines = [line if one else f"{name}: {line}" for name, line in spent.items()]
    for name, clients in promise.clients.items():
        each = listed([f"{client} {value:.4g}" for client, value in list(clients.items())[:NAMED_CLIENTS]])
        more = f" and {len(clients) - NAMED_CLIENTS} more clients" if len(clients) > NAMED_CLIENTS else ""
        lines.append(f"{'' if one else f'{name}: '}ε by client: {each}{more}")
    return lines if one else [*lines, f"all of these together: ε {promise.together:.4g} for any one {unit}"]


# Which rule to use, and the table behind it.


def headline(document: Comparison, *, lines: bool = True) -> list[str]:
    """Return the answer in plain sentences, the recommendation first: for the terminal, the report and notebooks.

    `lines` adds what a terminal shows in lines of its own, which are not broken: first that the run was changed, and
    last what to run for more seeds.
    """
    first = [f"{chain_line(document.chain)}."] if lines and document.chain.problem else []
    single = single_client_lines(document.weighed_one)
    found = document.recommendation
    if found is None:
        newest = max(rule.rounds for rule in document.rules)
        going = f"{Path(document.run).name} is {document.status}: round {newest} of {document.limit}."
        state = [going] if document.status != "finished" else []
        return [*first, *state, *single, "No round has been tested: no accuracy is known."]
    ended = [
        f"{rule.rule}, seed {each.seed}, ended in round {each.ended.round}: {each.ended.reason}. Its figures are those "
        "of its last tested model."
        for rule in document.rules
        for each in rule.seeds
        if each.ended
    ]
    more = more_seeds(found) if lines else []
    zero = [
        f"{name} was 0 for every client in {counted(count, 'round')} of {rule.rule}, so it favoured nobody there."
        for rule in document.rules
        for name, count in rule.zero_criteria.items()
    ]
    told = [*single, *ended, *zero, *_failing(document), *_at_zero(document, found), *_best(document)]
    return [*first, found.sentence, *told, *_flawed_sentence(document, found), *more]


def _failing(document: Comparison) -> list[str]:
    """Say which client failed in most of its rounds, and why; nothing where none did."""
    if not document.failing:
        return []
    worst, *others = document.failing
    more = f" {len(others)} more failed in at least half of theirs." if others else ""
    counted = f"{worst.failed} of its {worst.selected} updates"
    return [f"{worst.client} failed to send {counted}: {worst.reason.rstrip('.')}.{more}"]


def _at_zero(document: Comparison, found: Verdict) -> list[str]:
    """Name clients whose every test sample the rule to use gets wrong; nothing where all rules are at chance."""
    if found.answer is Answer.AT_CHANCE or not measure_of(document.measure).of_rows:
        return []
    rule = found.rule or next(iter(found.better), found.baseline)
    none = [each for each in document.rule(rule).clients if each.score == 0 and each.rows >= FEWEST]
    shown = [f"{each.client} (0 of {each.rows} samples)" for each in none[:MOST_NAMED]]
    more = f" and {len(none) - MOST_NAMED} more" if len(none) > MOST_NAMED else ""
    return [f"With {rule}, the last model is right on no test sample of {', '.join(shown)}{more}."] if none else []


def _best(document: Comparison) -> list[str]:
    """Say which round of each rule is the best, where rows choose one."""
    return [
        f"{rule.rule}, seed {each.seed}: the best round is {each.best.round}, chosen on other rows than report; its "
        f"{measure_of(each.best.measure).name} is {measure_of(each.best.measure).show(each.best.reported)}."
        for rule in document.rules
        for each in rule.seeds
        if each.best
    ]


def _flawed_sentence(document: Comparison, found: Verdict) -> list[str]:
    """Say who was flawed, and what share of all weight each rule gave them; nothing without flaws.

    Of more than three rules, the baseline and the best other are named.
    """
    flaws = document.flaws[document.seeds[0]]
    weights = {
        rule.rule: rule.figures["flawed_weight"].mean for rule in document.rules if "flawed_weight" in rule.figures
    }
    if not flaws or not weights:
        return []
    common = Counter(flaw for each in flaws.values() for flaw in each).most_common(1)[0][0]
    shown = list(weights)
    if len(shown) > 3:
        sign = -1.0 if found.less_is_better else 1.0
        others = [row for row in found.rules[1:] if row.rule in weights and not row.left_out]
        best = sorted(others, key=lambda row: sign * row.value.mean)[-1:]
        shown = [rule for rule in (found.baseline, *(row.rule for row in best)) if rule in weights]
    first, *rest = [f"{rule} gave them {weights[rule]:.0%}" for rule in shown]
    told = ", ".join([f"{first} of all weight", *rest])
    return [f"{len(flaws)} of {document.clients} clients were faulty (simulated): {common}. {told}."]


def comparison_parts(document: Comparison, *, all_tables: bool = True, in_words: bool = False) -> list[Block]:
    """Return the recommendation and the table behind it, then all other tables if wanted.

    `in_words` adds every test of every rule in words.
    """
    every = [*target_tables(document), *comparison_tables(document)] if all_tables else []
    found, words = document.tested(), tuple(rule.in_words for rule in document.rules[1:] if in_words)
    tables = [*_weighed_one(document), main_table(document), *every]
    # Last, where a terminal stands: a run that was changed is not to be missed.
    return [found.sentence, *tables, *([words] if words else []), *chain_lines(document.chain)]


def main_table(document: Comparison, *, target: bool = False) -> Table:
    """Return the table behind the recommendation: the measure that decides, and how flawed and worst clients fared.

    `target` adds in which round the clients reached the experiment's target.
    """
    found, score = document.tested(), measure_of(document.measure)
    measure, last = measure_of(found.measure), min(document.last, document.rounds)
    columns = [*_common(document), *_deciding(found, measure)]
    # The server may test by another measure than clients are scored by: RMSE, and minus RMSE.
    whose = " of users" if ranks_lists(document.measure) else " of clients"
    headings = {"worst_tenth": f"worst 10%{whose}"}
    headings["final"] = f"{score.name} on the clients" if measure != score else "on the clients"
    by_clients = "server" not in found.where
    for figure in FIGURES:
        if "main" not in figure.tables or (figure.name == "final" and (by_clients or not document.has("worst"))):
            continue
        column = figure_column(figure, score, "main", headings.get(figure.name, ""))
        if figure.name == "worst_tenth":
            column = Column(column.heading, lambda rule, column=column: _worst(rule, column, score))
            columns += [column, Column("their samples", _samples_of_the_worst)]
        elif figure.name != "testing_rounds" or any(rule.figures["testing_rounds"].mean > 0 for rule in document.rules):
            columns.append(column)
    if target and score.of_rows and document.has("worst"):
        heading = f"rounds until {document.share:.0%} of clients reach {document.target:.0%}"
        columns.append(Column(heading, _reached))
    over = f"mean of the last {last} tested rounds" if last > 1 else f"after round {document.rounds}"
    title = f"{measure.name[:1].upper()}{measure.name[1:]} {found.where}, {over}"
    return rule_table(title, document.rules, columns, _main_note(document, found), best=found.rule)


def _deciding(found: Verdict, measure: Measure) -> list[Column]:
    """Return the columns of the measure that decides: its value, the difference from the baseline, p."""
    digits, tests = 1 if measure.percent else 4, {row.rule: row for row in found.rules}

    def difference(rule: RuleResult) -> str:
        text = cell(tests[rule.rule].difference, digits, measure.factor)
        return text if text[0] in "−–" else f"+{text}"

    return [
        Column(measure.heading, lambda rule: cell(tests[rule.rule].value, digits, measure.factor)),
        Column(f"against {found.baseline}", difference),
        Column("p", lambda rule: _p(tests[rule.rule].p_holm)),
    ]


def _p(value: float | None) -> str:
    return UNKNOWN if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _worst(rule: RuleResult, column: Column, measure: Measure) -> str:
    """Write the worst tenth: over seeds as any mean, of one seed with the interval that its few rows give."""
    one = len(rule.seeds) == 1 and rule.worst_tenth_on
    return f"{column.cell(rule)} {on_cell(one, measure)}" if one else column.cell(rule)


def _samples_of_the_worst(rule: RuleResult) -> str:
    return f"{rule.worst_tenth_on.rows:,}" if rule.worst_tenth_on else UNKNOWN


def _reached(rule: RuleResult) -> str:
    found = rule.figures.get("rounds_to_target")
    known = [value for value in found.values if not math.isnan(value)] if found else []
    if found and len(known) == len(found.values):
        return cell(found)
    return f"{len(known)} of {len(rule.seeds)} seeds" if known else "never"


def _main_note(document: Comparison, found: Verdict) -> str:
    seeds = len(document.seeds)
    notes = [f"mean ± 95% interval over {seeds} seeds"] if seeds > 1 else ["one seed"]
    if any(row.p_holm is not None for row in found.rules):
        notes.append("p: paired t-test against the first rule after Holm's correction")
    if seeds >= LEAST_SEEDS and len(found.rules) > 1:
        small = "1 %" if found.less_is_better else "1 point" if measure_of(found.measure).percent else "0.01"
        needed = found.seeds_needed
        count = f"more than {MOST_SEEDS:,}" if needed is None else f"about {needed}"
        notes.append(f"a difference of {small} would need {count} seeds")
    known = [measure_of(found.measure)]
    if document.has("worst"):
        who = "users' lists" if ranks_lists(document.measure) else "clients' own tests"
        notes.append(f"the {who} are those after round {document.rounds}")
        known.append(measure_of(document.measure))
    alike = len({measure.direction for measure in known}) == 1
    notes.append(known[0].direction if alike else ", ".join(f"{each.name}: {each.direction}" for each in known))
    notes += [f"{row.rule} is not compared with it: {row.left_out}" for row in found.rules if row.left_out]
    text = "; ".join(notes)
    return f"{text[:1].upper()}{text[1:]}."


def _weighed_one(document: Comparison) -> list[Table]:
    """Which rules had rounds of one client: no rule is compared in those rounds."""
    if not document.weighed_one:
        return []
    rows = [(row.rule, str(row.seed), f"{row.rounds} of {row.of}") for row in document.weighed_one]
    note = f"These rounds cannot compare rules. {RAISE}"
    return [Table("Warning: rounds that weighted one client only", ("rule", "seed", "rounds"), tuple(rows), note)]


# The papers' tables.


def comparison_tables(document: Comparison) -> list[Table]:
    """Return the papers' tables beside those of targets: clients, server, testing rounds, samples, curves."""
    found: list[Table] = []
    for tables in (_devices, _clients, server_tables, class_tables):
        found += tables(document)
    found += [table(document) for table in (_ended, _left_out, _testing, _samples, _curves)]
    return [table for table in found if table.rows]


def target_tables(document: Comparison) -> list[Table]:
    """Return a table for each target: in which round each share of the clients reaches it."""
    return [_rounds(section, document) for section in document.rounds_to_target]


def _rounds(section: TargetTable, document: Comparison) -> Table:
    seeds = len(document.seeds)
    rows: list[tuple[str, ...]] = []
    for row in section.rows:
        base = row.kind == "rounds"
        cells = [UNKNOWN if base and part.unreached == seeds else cell(part) for part in row.cells]
        rows.append((row.rule + (" (rounds)" if base else ""), *cells, cell(row.average, 2), cell(row.printed, 2)))
    note = f"First row: rounds; others: rounds gained over it. Not reached counts as round {document.limit}"
    note += (
        f"; – : in no seed. Mean ± 95% interval over {seeds} seeds." if seeds > 1 else "; – : not reached. One seed."
    )
    note += " Printed: the average over the shares that the first row or the rule reached."
    headings = ("rule", *(f"{share:.0%}" for share in section.shares), "average", "printed")
    verb = "are above" if document.above else "reach"
    return Table(f"Rounds until a share of the clients {verb} {section.target:.0%}", headings, tuple(rows), note)


def _devices(document: Comparison) -> list[Table]:
    if not document.has("worst"):
        return []
    measure, own = measure_of(document.measure), any(rule.own_models for rule in document.rules)
    columns = [figure_column(figure, measure, "clients") for figure in FIGURES if "clients" in figure.tables]
    served = [figure for figure in FIGURES if own and figure.name == "server_accuracy"]
    columns += [figure_column(figure, measure, "clients", "server's test set") for figure in served]
    note = f"Final: over all test samples after round {document.rounds}; the rest over clients; {measure.direction}."
    if own:
        note += " Own models: each client tested its own. Server's test set: the global model."
    title = f"Local {document.measure} after the last round"
    return [rule_table(title, document.rules, [*_common(document), *columns], note)]


def _clients(document: Comparison) -> list[Table]:
    """Each client with its rows and interval, where they are few enough to read: hospitals, not telephones."""
    known = {(row.client, rule.rule): row for rule in document.rules for row in rule.clients}
    names = list(dict.fromkeys(client for client, _ in known))
    if not names or len(names) > MOST_CLIENTS:
        return []
    measure, rules = measure_of(document.measure), [rule.rule for rule in document.rules]
    rows: list[tuple[str, ...]] = []
    for name in names:
        mine = [known.get((name, rule)) for rule in rules]
        count = max(row.rows for row in mine if row)
        rows.append((name, f"{count:,}", *(_client_cell(row, measure) for row in mine)))
    note = f"{measure.heading} [95% interval from its samples], {measure.direction}. "
    note += "Do not rank clients whose intervals overlap, or clients with too few samples."
    return [Table("Client by client after the last round", ("client", "samples", *rules), tuple(rows), note)]


def _client_cell(row: ClientScore | None, measure: Measure) -> str:
    if row is None:
        return UNKNOWN
    return f"{show_number(row.score * measure.factor, 1 if measure.percent else 3)} {on_cell(row, measure)}"


def server_tables(document: Comparison) -> list[Table]:
    """Return how the last model does on the server's reporting rows, where these report."""
    figures = [figure for figure in FIGURES if "server" in figure.tables and document.has(figure.name)]
    by_direction: dict[str, list[str]] = {}
    for measure in (figure.measure for figure in figures if figure.measure):
        by_direction.setdefault(measure.direction, []).append(measure.name)
    note = "; ".join(f"{direction}: {', '.join(which)}" for direction, which in by_direction.items())
    columns = [figure_column(figure, measure_of(document.measure), "server") for figure in figures]
    title = "The last model on the server's test set"
    return [rule_table(title, document.rules, columns, f"{note[:1].upper()}{note[1:]}.")] if figures else []


def _ended(document: Comparison) -> Table:
    """Which rules ended early because their model exploded, so that nobody takes their figures for final ones."""
    rows = [
        (rule.rule, str(each.seed), str(each.ended.round), each.ended.reason)
        for rule in document.rules
        for each in rule.seeds
        if each.ended
    ]
    note = "The other tables show the last tested model; a target that it did not reach counts as not reached."
    return Table("Training diverged", ("rule", "seed", "round", "why"), tuple(rows), note)


def _left_out(document: Comparison) -> Table:
    """What `--rules all` asked for and this experiment cannot run, so that nobody takes the rest for everything."""
    return Table("Skipped rules", ("rule", "why"), tuple(document.left_out.items()))


def _testing(document: Comparison) -> Table:
    rows: list[tuple[str, ...]] = []
    for rule in document.rules:
        kept: dict[str, int] = {}
        for order, count in ((order, count) for each in rule.seeds for order, count in each.orders.kept.items()):
            kept[order] = kept.get(order, 0) + count
        listed = ", ".join(
            f"{order} {count}" for order, count in sorted(kept.items(), key=lambda one: (-one[1], one[0]))
        )
        tests = rule.figures["testing_rounds"]
        rows += [(rule.rule, str(document.rounds), cell(tests), listed)] if tests.mean > 0 else []
    headings = ("rule", "rounds", "testing rounds", "rounds that kept each order, all seeds")
    return Table("Online adjustment: what it cost and what it kept", headings, tuple(rows))


def _samples(document: Comparison) -> Table:
    base = document.baseline
    rows = [(rule.rule, *map(str, dict(rule.right_wrong).values())) for rule in document.rules if rule.right_wrong]
    headings = ("rule", "both wrong", "only the rule right", f"only {base} right", "both right")
    return Table(f"Test samples right or wrong in the last round, all seeds, against {base}", headings, tuple(rows))


def _curves(document: Comparison) -> Table:
    measure, first = measure_of(document.measure), document.rules[0].curve.rounds
    values = [value for rule in document.rules for value in rule.curve.mean]
    marks = sorted({first[max(0, math.ceil(share * len(first)) - 1)] for share in (0.05, 0.1, 0.25, 0.5, 1.0)})
    rows: list[tuple[str, ...]] = []
    for rule in document.rules:
        at = dict(zip(rule.curve.rounds, rule.curve.mean, strict=True))
        shown = [show_number(at[m] * measure.factor, 2 if measure.percent else 4) if m in at else "" for m in marks]
        rows.append((rule.rule, *shown, spark(rule.curve.mean, min(values), max(values))))
    headings = ("rule", *(f"round {mark}" for mark in marks), "curve")
    title = "Accuracy over all test samples (%)" if measure.of_rows else f"{measure.name}, round by round"
    return Table(title, headings, tuple(rows))


def class_tables(document: Comparison) -> list[Table]:
    """Return macro F1 at a few rounds and the last F1 of each class, where the server reports them; else nothing."""
    rules = [rule for rule in document.rules if rule.class_f1 and rule.class_f1[0]]
    if not rules:
        return []
    length = min(len(seed) for rule in rules for seed in rule.class_f1)
    marks = sorted({max(1, math.ceil(length * part / F1_ROUNDS)) for part in range(1, F1_ROUNDS + 1)} | {1})

    def mean(rule: RuleResult, mark: int) -> str:
        return cell(estimate([sum(seed[mark - 1]) / len(seed[mark - 1]) for seed in rule.class_f1]), 3)

    def of_class(rule: RuleResult, label: int) -> str:
        return cell(estimate([seed[length - 1][label] for seed in rule.class_f1]), 3)

    columns = [Column(f"round {mark}", lambda rule, mark=mark: mean(rule, mark)) for mark in marks]
    found = [rule_table("Macro F1 on the server's test set", rules, columns)]
    if (count := len(rules[0].class_f1[0][0])) <= MOST_CLASSES:
        columns = [Column(f"class {label}", lambda rule, label=label: of_class(rule, label)) for label in range(count)]
        found.append(rule_table(f"F1 of each class on the server's test set, round {length}", rules, columns))
    return found


# Files for programs.


def comparison_csv(document: Comparison) -> str:
    """Return the rounds-to-target tables as tidy CSV: a line per target, rule and share; the averages close each.

    A comparison without targets, such as one of errors or of lists, has a line per rule and figure.
    """
    if not document.rounds_to_target:
        figures = [
            (rule.rule, name, *_numbers(value)) for rule in document.rules for name, value in rule.figures.items()
        ]
        return as_csv(("rule", "figure", "mean", "low", "high", "seeds"), figures)
    rows: list[tuple[str | float, ...]] = []
    for section in document.rounds_to_target:
        for row in section.rows:
            parts: list[tuple[float | str, Estimate, int | str]] = [
                *((found.share, found, found.unreached) for found in row.cells),
                *(("average", row.average, ""), ("printed", row.printed, "")),
            ]
            for share, value, unreached in parts:
                mean, low, high, seeds = _numbers(value)
                rows.append((section.target, share, row.rule, row.kind, mean, low, high, unreached, seeds))
    return as_csv(("target", "share", "rule", "kind", "mean", "low", "high", "unreached", "seeds"), rows)


def _numbers(value: Estimate) -> tuple[float, float, float, int]:
    return value.mean, value.low, value.high, len(value.values)


def curves_csv(document: Comparison) -> str:
    """Return the curves as tidy CSV: rule, round, mean, low, high."""
    rows = [
        (rule.rule, *point)
        for rule in document.rules
        for point in zip(rule.curve.rounds, rule.curve.mean, rule.curve.low, rule.curve.high, strict=True)
    ]
    return as_csv(("rule", "round", "mean", "low", "high"), rows)


# Rounds to target in the shape of paper 003's Table 1: three groups of shares, three studies.


GROUPS: tuple[tuple[str, tuple[float, float]], ...] = (("Low", (0.2, 0.3)), ("Mid", (0.4, 0.5)), ("High", (0.7, 0.75)))
"""Shares of the devices by group, as in the paper."""
STUDIES = {"Ind": "single criteria", "MCA": "fixed orders", "Final": "online adjustment, by its first order"}


def study_of(rule: str) -> str:
    """Return which study of paper 003 a rule belongs to, by its name: DS, DS>LD>MD or online(DS>LD>MD)."""
    if rule.startswith(("online(", "online-apart(")):
        return "Final"
    return "MCA" if ">" in rule else "Ind"


def group_tables(curves: Sequence[Curve], targets: Sequence[float], limit: int, *, above: bool = False) -> list[Table]:
    """Return one table a target; use it for a comparison of single criteria, fixed orders and online starts.

    A cell is the mean over seeds; a seed that does not get there counts as the limit, which makes the cell "≥"; "—" is
    for cells that no seed reached, and for means over cells one of which nobody reached.
    """
    rules = sorted(dict.fromkeys(curve.rule for curve in curves), key=lambda rule: list(STUDIES).index(study_of(rule)))
    seeds = len({curve.seed for curve in curves})
    headings = ["study", "rule"]
    for name, shares in GROUPS:
        headings += [*(f"{name} {share:.0%}" for share in shares), f"{name} mean"]
    found: list[Table] = []
    for target in targets:
        cells = {
            rule: _cells([curve for curve in curves if curve.rule == rule], target, limit, above) for rule in rules
        }
        rows: list[tuple[str, ...]] = []
        for study in STUDIES:
            mine = [rule for rule in rules if study_of(rule) == study]
            rows += [(study, rule, *_shown(cells[rule])) for rule in mine]
            if study != "Ind" and len(mine) > 1:
                columns = zip(*(cells[rule] for rule in mine), strict=True)
                rows.append((study, "Mean", *_shown([_mean(column) for column in columns])))
        note = f"Rounds, mean of {seeds} seeds; ≥: some did not get there in {limit} rounds; —: none did. "
        note += "Studies: " + ", ".join(f"{name} {text}" for name, text in STUDIES.items()) + "."
        title = f"Rounds until a share of the clients {'are above' if above else 'reach'} {target:.0%}"
        found.append(Table(title, tuple(headings), tuple(rows), note, names=2))
    return found


Cell = tuple[float, int, int]
"""Mean rounds (unreached as the limit), how many runs it is made of, and how many of these reached the target."""


def _cells(curves: Sequence[Curve], target: float, limit: int, above: bool) -> list[Cell]:
    """Return six shares and three group means: each share of a group, then their mean."""
    found: list[Cell] = []
    for _, shares in GROUPS:
        pair: list[Cell] = []
        for share in shares:
            rounds = [rounds_to_target(curve.rounds, curve.scores, target, share, above=above) for curve in curves]
            counted = [limit if number is None else number for number in rounds]
            reached = sum(number is not None for number in rounds)
            pair.append((sum(counted) / len(counted), len(counted), reached))
        found += [*pair, _mean(pair)]
    return found


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean of cells; where nobody reached one of them there is nothing to take a mean of."""
    reached = 0 if any(not cell[2] for cell in cells) else sum(cell[2] for cell in cells)
    return sum(cell[0] for cell in cells) / len(cells), sum(cell[1] for cell in cells), reached


def _shown(cells: Sequence[Cell]) -> list[str]:
    return ["—" if not reached else f"{'≥' if reached < count else ''}{mean:.1f}" for mean, count, reached in cells]
