"""What weighing low-rank adapters lost, round by round."""

from __future__ import annotations

import json
from typing import Any, cast

import altair as alt

from steelyard.report.figures.shared import HEIGHT, POINTS, WIDTH, described, lists, round_axis
from steelyard.report.measures import OF_A_STEP
from steelyard.report.view import RunView, sampled

_WORDS = dict(zip(OF_A_STEP, ("weighing products (done)", "averaging A and B (not done)"), strict=True))


def lost(view: RunView) -> alt.LayerChart | None:
    """Draw what was lost of Σ wᵢBᵢAᵢ by cutting it to its rank, and what averaged factors would have lost."""
    found: dict[tuple[str, int], list[tuple[int, dict[str, float]]]] = {}
    for row in cast("list[dict[str, Any]]", view.rounds.to_dict("records")):
        text = row["server_metrics"]
        known: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
        if OF_A_STEP[0] in known:
            found.setdefault((str(row["rule"]), int(row["seed"])), []).append((int(row["round"]), known))
    rows: list[dict[str, Any]] = []
    for (rule, seed), mine in found.items():
        chosen = [mine[place] for place in sampled(len(mine), POINTS)]
        for figure, words in _WORDS.items():
            values = [known[figure] for _, known in chosen]
            given = {"rule": rule, "seed": seed, "lost by": words}
            rows.append({**given, "round": [round for round, _ in chosen], "lost": values})
    if not rows:
        return None
    line = (
        alt.Chart(lists(rows))
        .transform_flatten(["round", "lost"])
        .mark_line(point=max(len(row["round"]) for row in rows) <= 3)
        .encode(
            round_axis(min(row["round"][0] for row in rows), max(row["round"][-1] for row in rows)),
            alt.Y("lost:Q", title="lost of the adapters' weighted sum", axis=alt.Axis(format="%")),
            alt.Color("lost by:N"),
            alt.StrokeDash("rule:N"),
            detail="seed:N",
            tooltip=[alt.Tooltip("rule:N"), alt.Tooltip("round:Q"), alt.Tooltip("lost:Q", format=".2%")],
        )
    )
    ends = ", ".join(f"{row['rule']}, {row['lost by']}: {row['lost'][-1]:.2%}" for row in rows)
    chart = alt.layer(line, width=WIDTH, height=HEIGHT)
    return described(chart, f"What was lost of the weighted sum of the adapters, less is better. Last: {ends}.")
