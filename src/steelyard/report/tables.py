"""The tables of a comparison: the answer with the one behind it, and those of the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from steelyard.base.measures import Estimate, EstimateJson, Measure, estimate, measure_of, show_estimate, show_number
from steelyard.report.curves import Curve, rounds_to_target
from steelyard.report.notices import chain_line
from steelyard.report.rendering import Style, Table, as_csv, paragraph, render, spark
from steelyard.report.result import ClientScore, Comparison, DeviceRow, OnRows, RuleTables, TargetTable
from steelyard.report.statistics import LEAST_SEEDS, MOST_SEEDS
from steelyard.report.summary import ranks_lists
from steelyard.rounds.progress import RAISE

F1_ROUNDS = 6
"""Rounds that the table of macro F1 shows."""
MOST_CLIENTS = 20
"""Clients up to which each has a line of its own."""
MOST_CLASSES = 20
"""Classes up to which each has a column of its own."""


def comparison_tables(document: Comparison) -> list[Table]:
    """Return the papers' tables: rounds to target, devices, server, testing rounds, samples, curves."""
    return [*target_tables(document), *result_tables(document)]


def target_tables(document: Comparison) -> list[Table]:
    """Return a table for each target: after how many rounds a share of the devices reach it."""
    several = len(document["seeds"]) > 1
    return [_rounds(section, document, several) for section in document["rounds_to_target"] if section["rows"]]


def result_tables(document: Comparison) -> list[Table]:
    """Return what `target_tables` leaves: devices, server, testing rounds, samples, curves."""
    found = [table for tables in (_devices, _clients, _server, class_tables) for table in tables(document)]
    found += [table(document) for table in (_ended, _left_out, _flawed, _testing, _samples, _curves)]
    return [table for table in found if table.rows]


def cell(value: Estimate | EstimateJson, digits: int = 1, factor: float = 1.0) -> str:
    """Write an estimate as "mean±half", or the mean alone for one seed; counts of one seed without digits."""
    counted = len(value["values"]) == 1 and digits == 1 and factor == 1.0 and float(value["mean"]).is_integer()
    return show_estimate(value, 0 if counted else digits, factor, between="±")


def _rounds(section: TargetTable, document: Comparison, several: bool) -> Table:
    seeds = len(document["seeds"])
    rows: list[tuple[str, ...]] = []
    for row in section["rows"]:
        base = row["kind"] == "rounds"
        cells = ["–" if base and part["unreached"] == seeds else cell(part) for part in row["cells"]]
        averages = (cell(row[name], 2) for name in ("average", "printed"))
        rows.append((row["rule"] + (" (rounds)" if base else ""), *cells, *averages))
    note = f"First row: rounds; others: rounds gained over it. Not reached counts as round {document['limit']}"
    note += f"; – : in no seed. Mean ± 95 % interval over {seeds} seeds." if several else "; – : not reached. One seed."
    note += " Printed: the average over the shares that the first row or the rule reached."
    headings = ("rule", *(f"{share:.0%}" for share in section["shares"]), "average", "printed")
    verb = "are above" if document.get("reach") == "above" else "reach"
    return Table(f"Rounds until a share of the devices {verb} {section['target']:.0%}", headings, tuple(rows), note)


def worst_cell(row: DeviceRow, digits: int, measure: Measure) -> str:
    """Write the worst tenth: over seeds as any mean, of one seed with the interval that its few rows give."""
    found, rows = row["worst_tenth"], row["worst_tenth_on"]
    if len(found["values"]) != 1 or rows is None:
        return cell(found, digits, measure.factor)
    return f"{show_number(found['mean'] * measure.factor, digits)} {on_cell(rows, measure)}"


def on_cell(rows: OnRows, measure: Measure) -> str:
    """Write the interval that a score has from its rows, and whether these are too few: "[21–94] too few"."""
    return f"{measure.show_interval(rows['low'], rows['high'])}{' too few' if rows['too_few'] else ''}"


def algorithm_cells(document: Comparison) -> Callable[[str | None], tuple[str, ...]]:
    """Return what gives a rule's cell of the column of algorithms, its heading for None; none where all are FedAvg."""
    algorithms: Mapping[str, str] = document.get("algorithms", {})
    if all(name == "fedavg" for name in algorithms.values()):
        return lambda rule: ()
    return lambda rule: ("algorithm" if rule is None else algorithms.get(rule, "–"),)


def tested_cells(document: Comparison) -> Callable[[str | None], tuple[str, ...]]:
    """Return what says of a rule whose models its clients tested; nothing where all tested the server's."""
    personal = document.get("personal", [])
    if not personal:
        return lambda rule: ()
    return lambda rule: ("tested" if rule is None else "own models" if rule in personal else "common model",)


def _devices(document: Comparison) -> list[Table]:
    if not document["devices"]:
        return []
    measure = measure_of(document["measure"])
    columns = ("final", "best", "worst", "worst_tenth", "p10", "p90", "spread")
    named, tested = algorithm_cells(document), tested_cells(document)
    served = {row["rule"]: row["accuracy"] for row in document["server"] if "accuracy" in row and tested(None)}
    rows = [
        (
            *(row["rule"], *named(row["rule"]), *tested(row["rule"])),
            *(cell(row[name], 2 if measure.percent else 4, measure.factor) for name in columns),
            cell(row["jain"], 4),
            *([cell(served[row["rule"]], 2, 100.0)] if row["rule"] in served else ["–"] if served else []),
        )
        for row in document["devices"]
    ]
    unit = " (%)" if measure.percent else ""
    names = ("final", "best round", "worst client", "worst tenth", "10th perc.", "90th perc.", "std. dev.")
    headings = ("rule", *named(None), *tested(None), *(f"{name}{unit}" for name in names), "Jain")
    headings += ("server's rows (%)",) if served else ()
    note = f"Final: over all test samples after round {document['rounds']}; the rest over devices; {measure.direction}."
    if tested(None):
        note += " Own models: each client tested the one that it uses itself. Server's rows: the common model there."
    title = f"Local {document['measure']} after the last round"
    return [Table(title, headings, tuple(rows), note)]


def _clients(document: Comparison) -> list[Table]:
    """Each client with its rows and interval, where they are few enough to read: hospitals, not telephones."""
    names = list(dict.fromkeys(row["client"] for row in document["clients"]))
    if not names or len(names) > MOST_CLIENTS:
        return []
    measure = measure_of(document["measure"])
    known = {(row["client"], row["rule"]): row for row in document["clients"]}
    rows: list[tuple[str, ...]] = []
    for name in names:
        mine = [known.get((name, rule)) for rule in document["rules"]]
        count = max(row["rows"] for row in mine if row)
        rows.append((name, f"{count:,}", *(_client_cell(row, measure) for row in mine)))
    note = f"{measure.heading} [95 % interval from its rows], {measure.direction}. "
    note += "Clients whose intervals overlap have no sure rank; one with too few rows has none."
    return [Table("Client by client after the last round", ("client", "rows", *document["rules"]), tuple(rows), note)]


def _client_cell(row: ClientScore | None, measure: Measure) -> str:
    if row is None:
        return "–"
    score = f"{100 * row['score']:.1f}" if measure.percent else show_number(row["score"], 3)
    return f"{score} {on_cell(row, measure)}"


def _server(document: Comparison) -> list[Table]:
    names = [name for name in document["server"][0] if name != "rule"]
    names = [name for name in names if all(name in row for row in document["server"])]
    if not names:
        return []
    shown = {name: measure_of(name) for name in names}
    rows = [
        (
            row["rule"],
            *(
                cell(row[name], 3 if measure.bounded and not measure.percent else 2, measure.factor)
                for name, measure in shown.items()
            ),
        )
        for row in document["server"]
    ]
    by_direction: dict[str, list[str]] = {}
    for measure in shown.values():
        by_direction.setdefault(measure.direction, []).append(measure.name)
    note = "; ".join(f"{direction}: {', '.join(which)}" for direction, which in by_direction.items())
    headings = ("rule", *(measure.heading for measure in shown.values()))
    title = "The last model on the server's reporting rows"
    return [Table(title, headings, tuple(rows), f"{note[:1].upper()}{note[1:]}.")]


def _ended(document: Comparison) -> Table:
    """Which federations ended early because their model exploded, so that nobody takes their figures for final ones."""
    rows = [(row["rule"], str(row["seed"]), str(row["round"]), row["reason"]) for row in document.get("ended", [])]
    note = "Their last tested model stands in the other tables; a target that it had not reached is not reached."
    return Table("Ended early, without a sound model", ("rule", "seed", "round", "why"), tuple(rows), note)


def _left_out(document: Comparison) -> Table:
    """What `--rules all` asked for and this experiment cannot run, so that nobody takes the rest for everything."""
    return Table("Left out of all rules", ("rule", "why"), tuple(document.get("left_out", {}).items()))


def _flawed(document: Comparison) -> Table:
    rows = [(row["rule"], cell(row["weight"], 1, 100.0)) for row in document.get("flawed", [])]
    return Table("Share of all weight that flawed clients got", ("rule", "weight (%)"), tuple(rows))


def _testing(document: Comparison) -> Table:
    rows = [
        (
            row["rule"],
            str(document["rounds"]),
            cell(row["testing_rounds"]),
            ", ".join(f"{order} {count}" for order, count in row["orders_kept"].items()),
        )
        for row in document["testing"]
        if row["testing_rounds"]["mean"] > 0
    ]
    headings = ("rule", "rounds", "testing rounds", "rounds that kept each order, all seeds")
    return Table("Online adjustment: what it cost and what it kept", headings, tuple(rows))


def _samples(document: Comparison) -> Table:
    base = document["baseline"]
    rows = [
        (
            row["rule"],
            *(str(row[name]) for name in ("both_wrong", "only_rule_right", "only_baseline_right", "both_right")),
        )
        for row in document["right_wrong"]
    ]
    headings = ("rule", "both wrong", "only the rule right", f"only {base} right", "both right")
    return Table(f"Test samples right or wrong in the last round against {base}, all seeds", headings, tuple(rows))


def _curves(document: Comparison) -> Table:
    curves = document["curves"]
    values = [value for curve in curves for value in curve["mean"]]
    low, high = min(values), max(values)
    measure = measure_of(document["measure"])
    marks = sorted({_mark(curves[0]["rounds"], share) for share in (0.05, 0.1, 0.25, 0.5, 1.0)})
    rows: list[tuple[str, ...]] = []
    for curve in curves:
        at = dict(zip(curve["rounds"], curve["mean"], strict=True))
        shown = [
            show_number(at[mark] * measure.factor, 2 if measure.percent else 4) if mark in at else "" for mark in marks
        ]
        rows.append((curve["rule"], *shown, spark(curve["mean"], low, high)))
    headings = ("rule", *(f"round {mark}" for mark in marks), "curve")
    title = "Accuracy over all test samples (%)" if measure.of_rows else f"{measure.name}, round by round"
    return Table(title, headings, tuple(rows))


def _mark(rounds: Sequence[int], share: float) -> int:
    return rounds[max(0, math.ceil(share * len(rounds)) - 1)]


def class_tables(document: RuleTables) -> list[Table]:
    """Return macro F1 at a few rounds and the last F1 of each class, where the server reports them; else nothing."""
    rows = [row for row in document.get("class_curves", ()) if "f1" in row and row["f1"] and row["f1"][0]]
    if not rows:
        return []
    length = min(len(seed) for row in rows for seed in row["f1"])
    marks = sorted({max(1, math.ceil(length * part / F1_ROUNDS)) for part in range(1, F1_ROUNDS + 1)} | {1})
    macro = [
        (row["rule"], *(_f1_cell([sum(seed[mark - 1]) / len(seed[mark - 1]) for seed in row["f1"]]) for mark in marks))
        for row in rows
    ]
    found = [
        Table("Macro F1 on the server's reporting rows", ("rule", *(f"round {mark}" for mark in marks)), tuple(macro))
    ]
    count = len(rows[0]["f1"][0][0])
    if count <= MOST_CLASSES:
        last = [
            (row["rule"], *(_f1_cell([seed[length - 1][label] for seed in row["f1"]]) for label in range(count)))
            for row in rows
        ]
        headings = ("rule", *(f"class {label}" for label in range(count)))
        found.append(Table(f"F1 of each class on the server's reporting rows, round {length}", headings, tuple(last)))
    return found


def _f1_cell(values: Sequence[float]) -> str:
    return cell(estimate(values).as_json(), 3)


def comparison_csv(document: Comparison) -> str:
    """Return the rounds-to-target tables as tidy CSV: a line per target, rule and share; the averages close each.

    A comparison without targets, such as one of errors or of lists, has a line per rule and figure.
    """
    if not document["rounds_to_target"]:
        return _figures_csv(document)
    rows: list[tuple[str | float, ...]] = []
    for section in document["rounds_to_target"]:
        for row in section["rows"]:
            parts: list[tuple[float | str, EstimateJson, int | str]] = [
                *((found["share"], found, found["unreached"]) for found in row["cells"]),
                *((name, row[name], "") for name in ("average", "printed")),
            ]
            for share, value, unreached in parts:
                head = (section["target"], share, row["rule"], row["kind"])
                rows.append((*head, value["mean"], value["low"], value["high"], unreached, len(value["values"])))
    return as_csv(("target", "share", "rule", "kind", "mean", "low", "high", "unreached", "seeds"), rows)


def _figures_csv(document: Comparison) -> str:
    """Return how each rule serves the devices and the server, a line per rule and figure."""
    tables = {f"{document['measure']} on the clients": document["devices"], "on the server": document["server"]}
    rows = [
        (row["rule"], where, name, value["mean"], value["low"], value["high"], len(value["values"]))
        for where, table in tables.items()
        for row in cast("Sequence[Mapping[str, Any]]", table)
        for name, value in row.items()
        if isinstance(value, dict) and "values" in value
    ]
    return as_csv(("rule", "where", "figure", "mean", "low", "high", "seeds"), rows)


def curves_csv(document: Comparison) -> str:
    """Return the curves as tidy CSV: rule, round, mean, low, high."""
    rows = [
        (curve["rule"], *point)
        for curve in document["curves"]
        for point in zip(curve["rounds"], curve["mean"], curve["low"], curve["high"], strict=True)
    ]
    return as_csv(("rule", "round", "mean", "low", "high"), rows)


# The answer of a comparison: the recommendation and the table behind it.


def write_comparison(
    document: Comparison, style: Style, width: int | None = None, *, all_tables: bool = True, in_words: bool = False
) -> str:
    """Return the recommendation and the table behind it, then all other tables if wanted.

    `in_words` adds every test of every rule in words. Plain text is broken to `width`, where given.
    """
    tables = [*_weighed_one(document), main_table(document), *(comparison_tables(document) if all_tables else ())]
    sentences = [test["sentence"] for test in document["verdicts"]] if in_words else []
    answer = paragraph(document["recommendation"]["sentence"], style, width)
    # Last, where a terminal stands: a run that was changed is not to be missed. A head is copied, so it is not broken.
    chain = paragraph(chain_line(document["chain"]), style)
    return f"{answer}\n\n{render(tables, sentences, style, width)}" + (f"\n{chain}\n" if chain else "")


def main_table(document: Comparison) -> Table:
    """Return the table behind the recommendation: the measure that decides, and how flawed and worst clients fared."""
    found = document["recommendation"]
    last = min(document["last"], document["rounds"])
    measure = measure_of(found.measure)
    factor, digits = measure.factor, 1 if measure.percent else 4
    columns: dict[str, dict[str, str]] = {}
    for cells_of in (algorithm_cells(document), tested_cells(document)):
        if heading := cells_of(None):
            columns[heading[0]] = {rule: cells_of(rule)[0] for rule in document["rules"]}
    columns[measure.heading] = {row.rule: cell(row.value, digits, factor) for row in found.rules}
    others = [row for row in found.rules if row["difference"] is not None]
    if others:
        columns[f"against {found['baseline']}"] = {
            row.rule: _signed(row.difference, digits, factor) for row in others if row["difference"]
        }
    if any(row.p_holm is not None for row in others):
        columns["p"] = {row.rule: _p(row.p_holm) for row in others}
    if document["flawed"]:
        columns["weight of flawed (%)"] = {row["rule"]: cell(row["weight"], 1, 100.0) for row in document["flawed"]}
    columns |= _local_columns(document, on_server="server" in found.where)
    if any(row["testing_rounds"]["mean"] > 0 for row in document["testing"]):
        columns["testing rounds"] = {row["rule"]: cell(row["testing_rounds"]) for row in document["testing"]}
    rules = [row.rule for row in found.rules]
    rows = tuple((rule, *(cells.get(rule, "–") for cells in columns.values())) for rule in rules)
    best = rules.index(found.rule) if found.rule is not None and len(rules) > 1 else None
    over = f"mean of the last {last} tested rounds" if last > 1 else f"after round {document['rounds']}"
    shown = f"{measure.name[:1].upper()}{measure.name[1:]}"
    title = f"{shown} {found['where']}, {over}"
    return Table(title, ("rule", *columns), rows, _main_note(document), best=best)


def _local_columns(document: Comparison, *, on_server: bool) -> dict[str, dict[str, str]]:
    """The clients' own tests beside what decides: over all of their rows where the server decides, and the worst."""
    if not document["devices"]:
        return {}
    measure = measure_of(document["measure"])
    unit = " (%)" if measure.percent else ""
    digits = 1 if unit else 4
    rows = document["devices"]
    columns: dict[str, dict[str, str]] = {}
    # The server may test by another measure than clients are scored by: RMSE, and minus RMSE.
    other = measure_of(document["recommendation"]["measure"]) != measure
    if on_server:
        name = f"{measure.name} on the clients{unit}" if other else f"on the clients{unit}"
        columns[name] = {row["rule"]: cell(row["final"], digits, measure.factor) for row in rows}
    whose = " of the users" if ranks_lists(document["measure"]) else " of the clients" if other else ""
    columns[f"worst tenth{whose}{unit}"] = {row["rule"]: worst_cell(row, digits, measure) for row in rows}
    if counts := {row["rule"]: f"{found['rows']:,}" for row in rows if (found := row["worst_tenth_on"])}:
        columns["rows of the worst"] = counts
    return columns


def _signed(value: Estimate | EstimateJson, digits: int, factor: float) -> str:
    text = cell(value, digits, factor)
    return text if text[0] in "−–" else f"+{text}"


def _p(value: float | None) -> str:
    return "–" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _main_note(document: Comparison) -> str:
    found = document["recommendation"]
    seeds = len(document["seeds"])
    notes = [f"mean ± 95 % interval over {seeds} seeds"] if seeds > 1 else ["one seed"]
    if any(row.p_holm is not None for row in found.rules):
        notes.append("p: paired t-test against the first rule after Holm's correction")
    if seeds >= LEAST_SEEDS and len(found.rules) > 1:
        small = "1 %" if found.less_is_better else "1 point" if measure_of(found.measure).percent else "0.01"
        needed = found.seeds_needed
        count = f"more than {MOST_SEEDS:,}" if needed is None else f"about {needed}"
        notes.append(f"a difference of {small} would need {count} seeds")
    if document["devices"]:
        who = "users' lists" if ranks_lists(document["measure"]) else "clients' own tests"
        notes.append(f"the {who} are those after round {document['rounds']}")
    known = [measure_of(found.measure), *([measure_of(document["measure"])] if document["devices"] else [])]
    alike = len({measure.direction for measure in known}) == 1
    notes.append(known[0].direction if alike else ", ".join(f"{each.name}: {each.direction}" for each in known))
    notes += [f"{row['rule']} is not held against it: {row['left_out']}" for row in found.rules if row["left_out"]]
    text = "; ".join(notes)
    return f"{text[:1].upper()}{text[1:]}."


def _weighed_one(document: Comparison) -> list[Table]:
    """Which federations had rounds of one client: no rule is compared in those rounds."""
    found = document.get("weighed_one", [])
    if not found:
        return []
    rows = [(row["rule"], str(row["seed"]), f"{row['rounds']} of {row['of']}") for row in found]
    note = f"No rule can prefer one client to another there. {RAISE}"
    return [Table("Warning: rounds that weighed one client only", ("rule", "seed", "rounds"), tuple(rows), note)]


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
        title = f"Rounds until a share of the devices {'are above' if above else 'reach'} {target:.0%}"
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


# One comparison at several participations, a column for each share of the clients.


def participation_tables(documents: Mapping[float, Comparison], left_out: Sequence[str] = ()) -> list[Table]:
    """Return how every rule does at each share: what decides, and the worst client where clients test.

    Every figure has the interval over seeds that the comparison itself has.
    """
    first = next(iter(documents.values()))
    tables = [_table(documents, "Accuracy on the server's rows", _server_share, 100.0)]
    measure = first["measure"]
    factor = measure_of(measure).factor
    title = f"Local {measure}, all test samples"
    tables.append(_table(documents, title, lambda each: {row["rule"]: row["final"] for row in each["devices"]}, factor))
    tables.append(_table(documents, f"Local {measure} of the worst client", _worst, factor))
    seeds = len(first["seeds"])
    note = f"After the last round. {'One seed.' if seeds == 1 else f'Mean ± 95 % interval over {seeds} seeds.'}"
    note = " ".join([note, *left_out])
    return [Table(table.title, table.headings, table.rows, note) for table in tables if table is not None]


def _server_share(document: Comparison) -> dict[str, EstimateJson]:
    return {row["rule"]: row["accuracy"] for row in document["server"] if "accuracy" in row}


def _worst(document: Comparison) -> dict[str, EstimateJson]:
    return {row["rule"]: row["worst"] for row in document["devices"]}


def _table(
    documents: Mapping[float, Comparison],
    title: str,
    figures: Callable[[Comparison], dict[str, EstimateJson]],
    factor: float,
) -> Table | None:
    """Return one figure of all rules at all shares; None where the runs have no such figure."""
    found = {share: figures(document) for share, document in documents.items()}
    if not any(found.values()):
        return None
    digits, unit = (2, " (%)") if factor == 100.0 else (4, "")
    rules = dict.fromkeys(rule for document in documents.values() for rule in document["rules"])
    rows = [
        (rule, *(cell(known[rule], digits, factor) if rule in known else "–" for known in found.values()))
        for rule in rules
    ]
    return Table(f"{title}{unit}, by participation", ("rule", *(f"{share:.0%}" for share in found)), tuple(rows))
