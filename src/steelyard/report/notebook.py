"""A result as a notebook shows it: what happened in a sentence, the main table, and the curves."""

from __future__ import annotations

from html import escape

from steelyard.report.figures.catalogue import draw
from steelyard.report.figures.writing import svg
from steelyard.report.headline import headline
from steelyard.report.html import result_grid, table
from steelyard.report.view import RunView


def notebook_html(view: RunView) -> str:
    """Return a run as HTML without scripts, so that it shows in any notebook and without a network."""
    chart = draw(view, "server")
    chart = draw(view, "accuracy") if chart is None else chart
    told = "".join(f"<p>{escape(line)}</p>" for line in headline(view))
    grids = "".join(table(result_grid(view, index)) for index in range(len(view.histories)))
    return f"<div>{told}{grids}{'' if chart is None else svg(chart)}</div>"
