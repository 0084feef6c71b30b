"""Rounds to target in the shape of paper 003's Table 1: absolute rounds, three groups of shares, three studies."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.report.measures import rounds_to_target
from steelyard.report.recorded_curves import Curve
from steelyard.report.rendering import Table

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
