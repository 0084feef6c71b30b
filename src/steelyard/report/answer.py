"""The answer of a comparison: the recommendation, the table behind it, and after it what the papers print."""

from __future__ import annotations

from steelyard.base.measures import EstimateJson, measure_of
from steelyard.report.comparison_tables import algorithm_cells, cell, comparison_tables, tested_cells, worst_cell
from steelyard.report.documents.comparison import Comparison
from steelyard.report.notices import chain_line
from steelyard.report.rendering import Style, Table, paragraph, render
from steelyard.report.statistics import LEAST_SEEDS, MOST_SEEDS
from steelyard.report.summary import ranks_lists
from steelyard.rounds.progress import RAISE


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


def main_table(document: Comparison, name: str = "") -> Table:
    """Return the table behind the recommendation: the measure that decides, and how flawed and worst clients fared."""
    found = document["recommendation"]
    last = min(document["last"], document["rounds"])
    measure = measure_of(found["measure"])
    factor, digits = measure.factor, 1 if measure.percent else 4
    columns: dict[str, dict[str, str]] = {}
    for cells_of in (algorithm_cells(document), tested_cells(document)):
        if heading := cells_of(None):
            columns[heading[0]] = {rule: cells_of(rule)[0] for rule in document["rules"]}
    columns[measure.heading] = {row["rule"]: cell(row["value"], digits, factor) for row in found["rules"]}
    others = [row for row in found["rules"] if row["difference"] is not None]
    if others:
        columns[f"against {found['baseline']}"] = {
            row["rule"]: _signed(row["difference"], digits, factor) for row in others if row["difference"]
        }
    if any(row["p_holm"] is not None for row in others):
        columns["p"] = {row["rule"]: _p(row["p_holm"]) for row in others}
    if document["flawed"]:
        columns["weight of flawed (%)"] = {row["rule"]: cell(row["weight"], 1, 100.0) for row in document["flawed"]}
    columns |= _local_columns(document, on_server="server" in found["where"])
    if any(row["testing_rounds"]["mean"] > 0 for row in document["testing"]):
        columns["testing rounds"] = {row["rule"]: cell(row["testing_rounds"]) for row in document["testing"]}
    rules = [row["rule"] for row in found["rules"]]
    rows = tuple((rule, *(cells.get(rule, "–") for cells in columns.values())) for rule in rules)
    best = rules.index(found["rule"]) if found["rule"] is not None and len(rules) > 1 else None
    over = f"mean of the last {last} tested rounds" if last > 1 else f"after round {document['rounds']}"
    shown = f"{measure.name[:1].upper()}{measure.name[1:]}"
    title = f"{name}{shown} {found['where']}, {over}"
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


def _signed(value: EstimateJson, digits: int, factor: float) -> str:
    text = cell(value, digits, factor)
    return text if text[0] in "−–" else f"+{text}"


def _p(value: float | None) -> str:
    return "–" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _main_note(document: Comparison) -> str:
    found = document["recommendation"]
    seeds = len(document["seeds"])
    notes = [f"mean ± 95 % interval over {seeds} seeds"] if seeds > 1 else ["one seed"]
    if any(row["p_holm"] is not None for row in found["rules"]):
        notes.append("p: paired t-test against the first rule after Holm's correction")
    if seeds >= LEAST_SEEDS and len(found["rules"]) > 1:
        small = "1 %" if found["less_is_better"] else "1 point" if measure_of(found["measure"]).percent else "0.01"
        needed = found["seeds_needed"]
        count = f"more than {MOST_SEEDS:,}" if needed is None else f"about {needed}"
        notes.append(f"a difference of {small} would need {count} seeds")
    if document["devices"]:
        who = "users' lists" if ranks_lists(document["measure"]) else "clients' own tests"
        notes.append(f"the {who} are those after round {document['rounds']}")
    known = [measure_of(found["measure"]), *([measure_of(document["measure"])] if document["devices"] else [])]
    alike = len({measure.direction for measure in known}) == 1
    notes.append(known[0].direction if alike else ", ".join(f"{each.name}: {each.direction}" for each in known))
    notes += [f"{row['rule']} is not held against it: {row['left_out']}" for row in found["rules"] if row["left_out"]]
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
