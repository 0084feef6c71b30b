"""The figures of a run, each made once for the page, the report, the notebook and the paper.

`draw(view, kind)` returns an Altair chart or None where the run has nothing to show for it, `spec` its Vega-Lite
document, `theme` the look, `bundle` the scripts that show it without a network, `write_figure` a file for a paper.
"""

from __future__ import annotations

from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError, expect, listed, nearest, told_as
from steelyard.report.figures import all_rules as all_rules
from steelyard.report.figures import measured as measured
from steelyard.report.figures import one_rule as one_rule
from steelyard.report.figures.look import (
    ENDINGS,
    KINDS,
    Chart,
    Figure,
    bundle,
    spec,
    svg,
    theme,
    write_figure,
    write_figures,
)
from steelyard.report.result import Comparison
from steelyard.report.tables import curves_csv
from steelyard.report.view import RunView

__all__ = [
    "KINDS",
    "Figure",
    "bundle",
    "draw",
    "draw_all",
    "spec",
    "svg",
    "theme",
    "write_curves",
    "write_figure",
    "write_figures",
]


def draw(
    view: RunView, kind: str, *, rule: str | None = None, seed: int | None = None, client: str | None = None
) -> Chart | None:
    """Draw one figure as an Altair chart; None where the runs have nothing to show for it.

    `rule` is a label of the view and `seed` one of its seeds, for figures of one rule; by default those of the
    main rule, or of the first that has something to show.
    """
    expect("kind", kind, str, "the name of a figure")
    for name, value in (("rule", rule), ("client", client)):
        expect(name, value, (str, type(None)), f"the name of a {name}, or None")
    if kind not in KINDS:
        raise UserError(f"kind: got '{kind}'{nearest(kind, KINDS)}; allowed: {listed(KINDS)}")
    chosen = KINDS[kind]
    if chosen.of == "view":
        return chosen.drawn(view)
    federation = view.federation(rule, seed)
    if chosen.of == "federation":
        others = [one for one in view.federations if not rule and one.seed == federation.seed]
        drawn = (chosen.drawn(view, one) for one in dict.fromkeys((federation, *others)))
        return next((chart for chart in drawn if chart is not None), None)
    if client is None:
        raise UserError("client: none named; allowed: the name of a client of the run")
    return chosen.drawn(view, federation, client)


def draw_all(view: RunView) -> dict[str, Chart]:
    """Draw every figure that the runs have something to show for, those of one rule for the main one."""
    found = {name: draw(view, name) for name, kind in KINDS.items() if kind.of != "client"}
    return {name: chart for name, chart in found.items() if chart is not None}


def write_curves(folder: Path, document: Comparison, path: Path) -> None:
    """Write the curves of a run as a picture (.svg, .png, .pdf) or as numbers (.csv), by the ending of its name."""
    if path.suffix in ENDINGS:
        write_figure(draw(RunView([folder]), "accuracy"), path)
        return
    if path.suffix != ".csv":
        raise UserError(f"--curves: got '{path}'; allowed: a file name that ends in .svg, .png, .pdf or .csv")
    with told_as(f"--curves: {path} cannot be written", "a writable file"):
        files.write(path, curves_csv(document).encode("utf-8"))
