"""The figures of a run, each made once for the page, the report, the notebook and the paper.

`draw(view, kind)` returns an Altair chart or None where the run has nothing to show for it, `spec` its Vega-Lite
document, `theme` the look, `bundle` the scripts that show it without a network, `write_figure` a file for a paper.
"""

from steelyard.report.figures.catalogue import KINDS, Kind, draw, draw_all, spec, write_figure, write_figures
from steelyard.report.figures.look import bundle, theme

__all__ = ["KINDS", "Kind", "bundle", "draw", "draw_all", "spec", "theme", "write_figure", "write_figures"]
