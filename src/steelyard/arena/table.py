"""The answer of an arena for people: the sentence, a line for each scene, and every rule over all scenes."""

from __future__ import annotations

import math

from steelyard.report.documents.arena import ArenaDocument, ArenaScene
from steelyard.report.documents.shared import EstimateJson
from steelyard.report.rendering import Style, Table, paragraph, render

_DASH = "–"


def arena_text(document: ArenaDocument, style: Style = "text", width: int | None = None) -> str:
    """Write the answer as plain text, Markdown or LaTeX; the sentence is the first line."""
    tables = [_scenes(document), *([_rules(document)] if document["ranks"] else [])]
    return f"{paragraph(document['sentence'], style)}\n\n{render(tables, _failures(document), style, width)}"


def _scenes(document: ArenaDocument) -> Table:
    name, base = document["candidate"], document["baseline"]
    whole = "" if document["whole"] else ", not the whole suite"
    return Table(
        f"{name} against {base}: suite {document['suite']}, version {document['version']}{whole}",
        ("scene", f"{base} (%)", f"{name} (%)", "gain (points)", "p (Holm)", "worst client, gain", "verdict"),
        tuple(_cells(scene, document) for scene in document["scenes"]),
        f"Mean of {len(document['seeds'])} seeds ± half the 95 % interval, on rows that chose nothing. Paired t-tests, "
        f"Holm's correction over the scenes. Equal: within {100 * document['margin']:g} point by two one-sided tests.",
    )


def _cells(scene: ArenaScene, document: ArenaDocument) -> tuple[str, ...]:
    by_rule = {row["rule"]: row for row in scene["rules"]}
    base, mine = by_rule.get(document["baseline"]), by_rule.get(document["candidate"])
    p = scene["p_holm"]
    return (
        scene["scene"],
        _DASH if base is None else show(base["value"]),
        _DASH if mine is None else show(mine["value"]),
        show(scene["gain"], signed=True),
        _DASH if p is None else f"{p:.2g}",
        show(scene["worst_gain"], signed=True),
        _verdict(scene),
    )


def _verdict(scene: ArenaScene) -> str:
    equal = scene["equal_p_holm"] is not None and scene["equal_p_holm"] < 0.05
    return (
        f"{scene['verdict']}, within the margin"
        if equal and scene["verdict"] in ("better", "worse")
        else scene["verdict"]
    )


def _rules(document: ArenaDocument) -> Table:
    critical = document["critical_difference"]
    apart = (
        "" if critical is None else f" Mean ranks less than {critical:.2f} apart cannot be told apart (Nemenyi, 5 %)."
    )
    return Table(
        "Every rule over the scenes",
        ("rule", "mean rank", "accuracy (%)", "worst client (%)"),
        tuple(
            (row["rule"], f"{row['rank']:.2f}", f"{100 * row['value']:.1f}", f"{100 * row['worst']:.1f}")
            for row in document["ranks"]
        ),
        f"Rank 1 is the best.{apart}",
    )


def _failures(document: ArenaDocument) -> list[str]:
    return [f"{scene['scene']}: failed: {scene['failed']}" for scene in document["scenes"] if scene["failed"]]


def show(value: EstimateJson | None, *, signed: bool = False) -> str:
    """Write a share in points with half its interval: 94.5 ± 0.3, or +1.2 ± 0.4."""
    if value is None or math.isnan(value["mean"]):
        return _DASH
    half = (value["high"] - value["low"]) / 2
    mean = f"{100 * value['mean']:{'+' if signed else ''}.1f}".replace("-", "−")
    return mean if math.isnan(half) else f"{mean} ± {100 * half:.1f}"
