"""The sign on a report: which way its beam tips, by how much, and what it says of that."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from steelyard.report import sign as module
from steelyard.report.sign import drawn, sign, tilt


def shown(monkeypatch: pytest.MonkeyPatch, shares: dict[str, float] | None) -> tuple[str, str]:
    """The sign of a run in which flawed clients had these shares, under the rule VP>DS."""
    asked: list[tuple[object, str]] = []

    def of(view: object, label: str) -> dict[str, float] | None:
        asked.append((view, label))
        return shares

    monkeypatch.setattr(module, "flawed_means", of)
    view = SimpleNamespace(federation=lambda: SimpleNamespace(label="VP>DS"))
    found = sign(view)  # type: ignore[arg-type]
    assert asked == [(view, "VP>DS")]
    return found


def parts(svg: str) -> dict[str, str]:
    """What moves in the drawing: beam, load, sliding weight; and its title and class."""
    root = ET.fromstring(svg)
    moved = {group.get("class", ""): group.get("transform", "") for group in root.iter("g")}
    title = root.find("title")
    assert title is not None
    circle = root.find(".//circle")
    assert circle is not None
    return moved | {"title": title.text or "", "sign": root.get("class", ""), "circle": circle.get("cx", "")}


@pytest.mark.parametrize(
    ("number", "weight", "angle", "poise", "end"),
    [
        (0.3, 0.1, "8.0", "182.4", ": the beam tips them up."),
        (0.25, 0.5, "-10.0", "144.0", ": they tip the beam."),
        (0.5, 0.5, "0.0", "144.0", "."),
        # Half a percent is still level, a little more is not.
        (0.5, 0.496, "0.2", "144.4", "."),
        (0.5, 0.504, "-0.2", "143.6", "."),
        (0.5, 0.494, "0.2", "144.6", ": the beam tips them up."),
        (0.5, 0.506, "-0.2", "143.4", ": they tip the beam."),
        (0.9, 0.1, "14.0", "182.4", ": the beam tips them up."),
    ],
)
def test_the_beam_shows_the_weight_against_the_number(
    monkeypatch: pytest.MonkeyPatch, number: float, weight: float, angle: str, poise: str, end: str
) -> None:
    svg, caption = shown(monkeypatch, {"weight": weight, "samples": 0.0, "updates": number})
    said = f"Under VP>DS flawed clients were {number:.0%} of those asked and got {weight:.0%} of the weight{end}"
    assert caption == said
    drawing = parts(svg)
    assert drawing["title"] == said
    assert drawing["sign"] == "sign"
    assert drawing["beam"] == f"rotate({angle} 70 28)"
    # The load hangs straight down from the beam.
    assert drawing["load"] == f"rotate({-float(angle):.1f} 34 28)"
    assert drawing["circle"] == poise


def test_without_flawed_clients_the_beam_is_level_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    svg, caption = shown(monkeypatch, None)
    assert caption == ""
    drawing = parts(svg)
    assert drawing["title"] == "A steelyard, level."
    assert drawing["sign"] == "sign plain"
    assert drawing["beam"] == "rotate(0.0 70 28)"
    assert drawing["circle"] == "150.0"


def test_the_beam_tips_to_the_heavier_side_and_not_over() -> None:
    assert tilt(0.3, 0.1) == pytest.approx(8.0)
    assert tilt(0.3, 0.5) == pytest.approx(-8.0)
    assert tilt(0.3, 0.3) == 0
    assert (tilt(1.0, 0.0), tilt(0.0, 1.0)) == (14.0, -14.0)


def test_the_title_is_text_not_markup() -> None:
    assert '<title id="sign-title">VP&gt;DS &amp; more</title>' in drawn(1.0, 2.0, "VP>DS & more")
