"""A result as a notebook shows it: what happened in a sentence, the main table, and the curves."""

from __future__ import annotations

from html import escape

from steelyard.report.figures.catalogue import draw
from steelyard.report.figures.writing import svg
from steelyard.report.headline import headline
from steelyard.report.html import result_table
from steelyard.report.rendering import as_html
from steelyard.report.view import RunView


def notebook_html(view: RunView) -> str:
    """Return a run as HTML without scripts, so that it shows in any notebook and without a network."""
    chart = draw(view, "server")
    chart = draw(view, "accuracy") if chart is None else chart
    sentences = "".join(f"<p>{escape(line)}</p>" for line in headline(view))
    tables = "".join(as_html(result_table(view, index)) for index in range(len(view.histories)))
    return f"<div>{sentences}{tables}{'' if chart is None else svg(chart)}</div>"
