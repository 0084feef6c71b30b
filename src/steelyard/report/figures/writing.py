"""Figures as files for papers and slides: SVG, PNG and PDF, made without a browser or a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.report.comparison_tables import curves_csv
from steelyard.report.documents.comparison import Comparison
from steelyard.report.documents.shared import VegaLite
from steelyard.report.figures.catalogue import Chart, draw, spec
from steelyard.report.figures.theme import theme
from steelyard.report.view import RunView

ENDINGS = (".svg", ".png", ".pdf")
PAPER = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""Fonts that are drawn into files; the page takes the reader's own."""


def write_figure(chart: Chart, path: Path) -> None:
    """Write a chart as SVG, PNG (double size) or PDF, by the ending of the file's name."""
    if path.suffix not in ENDINGS:
        raise UserError(f"figure: got '{path}'; allowed: a file name that ends in .svg, .png or .pdf")
    _write({path: _converted(svg(chart), path.suffix)})


def write_figures(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Write every chart as SVG, PNG and PDF into a folder and return the files; all of them, or none."""
    for name in charts:
        for ending in ENDINGS:
            files.is_file(folder / f"{name}{ending}")  # a link is refused before anything is drawn
    made: dict[Path, bytes] = {}
    for name, chart in charts.items():
        drawn = svg(chart)  # what takes long; the others are made from it
        made |= {folder / f"{name}{ending}": _converted(drawn, ending) for ending in ENDINGS}
    _write(made)
    return list(made)


def _write(made: Mapping[Path, bytes]) -> None:
    with told_as(f"{next(iter(made))}: cannot be written", "a writable file"):
        files.write_all(made)


def svg(chart: Chart) -> str:
    """Return a chart as SVG text; a notebook shows it without scripts."""
    # For speed of start: only files and notebooks need it.
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_dressed(spec(chart))))


def _converted(drawn: str, ending: str) -> bytes:
    # For speed of start, as above.
    import vl_convert

    if ending == ".png":
        return vl_convert.svg_to_png(drawn, scale=2)
    return vl_convert.svg_to_pdf(drawn) if ending == ".pdf" else drawn.encode("utf-8")


def _dressed(document: VegaLite) -> str:
    config: VegaLite = theme() | {"font": PAPER, "background": "white"}
    config["text"] = config["text"] | {"font": PAPER}
    return json.dumps(document | {"config": config})


def write_curves(folder: Path, document: Comparison, path: Path) -> None:
    """Write the curves of a run as a picture (.svg, .png, .pdf) or as numbers (.csv), by the ending of its name."""
    if path.suffix in ENDINGS:
        write_figure(draw(RunView([folder]), "accuracy"), path)
        return
    if path.suffix != ".csv":
        raise UserError(f"--curves: got '{path}'; allowed: a file name that ends in .svg, .png, .pdf or .csv")
    with told_as(f"--curves: {path} cannot be written", "a writable file"):
        files.write(path, curves_csv(document).encode("utf-8"))
