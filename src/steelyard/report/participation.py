"""One comparison at several participations: a column for each share of the clients that trains in a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from steelyard.base.measures import EstimateJson, measure_of
from steelyard.report.comparison_tables import cell
from steelyard.report.documents.comparison import Comparison
from steelyard.report.rendering import Table


def participation_tables(documents: Mapping[float, Comparison], left_out: Sequence[str] = ()) -> list[Table]:
    """Return how every rule does at each share: what decides, and the worst client where clients test.

    Every figure has the interval over seeds that the comparison itself has.
    """
    first = next(iter(documents.values()))
    tables = [_table(documents, "Accuracy on the server's rows", _server, 100.0)]
    measure = first["measure"]
    factor = measure_of(measure).factor
    title = f"Local {measure}, all test samples"
    tables.append(_table(documents, title, lambda each: {row["rule"]: row["final"] for row in each["devices"]}, factor))
    tables.append(_table(documents, f"Local {measure} of the worst client", _worst, factor))
    seeds = len(first["seeds"])
    note = f"After the last round. {'One seed.' if seeds == 1 else f'Mean ± 95 % interval over {seeds} seeds.'}"
    note = " ".join([note, *left_out])
    return [Table(table.title, table.headings, table.rows, note) for table in tables if table is not None]


def _server(document: Comparison) -> dict[str, EstimateJson]:
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
