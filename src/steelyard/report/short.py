"""A run in a few lines of plain text: one line per rule; for prompts, notebooks and logs."""

from __future__ import annotations

from steelyard.report.documents import RuleSummary, Summary
from steelyard.report.notices import single_client_lines
from steelyard.report.rendering import Table, as_text
from steelyard.rounds.progress import show_score

MOST_RULES = 12
LONGEST_NAME = 40


def short_account(summary: Summary) -> str:
    """Return a summary as a small table: rule, scores, rounds to the target; only columns that some rule has."""
    rules = summary["rules"]
    columns = {"rule": [_name(rule, several=len({rule["seed"] for rule in rules}) > 1) for rule in rules]}
    if any(rule["algorithm"] != "fedavg" for rule in rules):
        columns["algorithm"] = [str(rule["algorithm"]) for rule in rules]
    columns[f"{summary['measure']} on the clients"] = [_score(rule["accuracy"]) for rule in rules]
    columns["worst 10%"] = [_score(rule["worst_tenth"]) for rule in rules]
    columns["on the server's rows"] = [_score(rule["server"].get("accuracy")) for rule in rules]
    reached = [rule["rounds_to_target"] for rule in rules]
    columns["rounds to target"] = ["-" if rounds is None else str(rounds) for rounds in reached]
    shown = {name: cells for name, cells in columns.items() if name == "rule" or any(cell != "-" for cell in cells)}
    rows = tuple(zip(*shown.values(), strict=True))
    text = as_text(Table("", tuple(shown), rows[:MOST_RULES]))
    more = [f"and {len(rules) - MOST_RULES} more rules"] if len(rules) > MOST_RULES else []
    return "\n".join([text, *more, *single_client_lines(summary["weighed_one"]), f"run stored in {summary['run']}"])


def _name(rule: RuleSummary, *, several: bool) -> str:
    name = str(rule["rule"])
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
    return f"{name} #{rule['seed']}" if several else name


def _score(value: float | None) -> str:
    return "-" if value is None or value != value else show_score(value)
