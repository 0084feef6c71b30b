"""The papers' tables of a comparison: rounds to target, devices, server, classes, samples, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from steelyard.base.measures import EstimateJson, Measure, estimate, measure_of, show_estimate, show_number
from steelyard.report.documents.comparison import ClientScore, Comparison, DeviceRow, RuleTables, TargetTable
from steelyard.report.documents.shared import OnRows
from steelyard.report.rendering import Table, as_csv, spark

F1_ROUNDS = 6
"""Rounds that the table of macro F1 shows."""
MOST_CLIENTS = 20
"""Clients up to which each has a line of its own."""
MOST_CLASSES = 20
"""Classes up to which each has a column of its own."""


def comparison_tables(document: Comparison) -> list[Table]:
    """Return the papers' tables: rounds to target, devices, server, testing rounds, samples, curves."""
    several = len(document["seeds"]) > 1
    found = [_rounds(section, document, several) for section in document["rounds_to_target"]]
    for tables in (_devices, _clients, _server, class_tables):
        found += tables(document)
    found += [table(document) for table in (_ended, _left_out, _flawed, _testing, _samples, _curves)]
    return [table for table in found if table.rows]


def cell(value: EstimateJson, digits: int = 1, factor: float = 1.0) -> str:
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
    """Return the rounds-to-target tables as tidy CSV: a line per target, rule and share; the averages close each."""
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


def curves_csv(document: Comparison) -> str:
    """Return the curves as tidy CSV: rule, round, mean, low, high."""
    rows = [
        (curve["rule"], *point)
        for curve in document["curves"]
        for point in zip(curve["rounds"], curve["mean"], curve["low"], curve["high"], strict=True)
    ]
    return as_csv(("rule", "round", "mean", "low", "high"), rows)
