"""`steelyard table --curves FILE`: the accuracy curves as a picture or as numbers."""

from __future__ import annotations

from pathlib import Path

from steelyard import files
from steelyard.errors import UserError
from steelyard.report.comparison_tables import curves_csv
from steelyard.report.documents import Comparison
from steelyard.report.figures.catalogue import draw
from steelyard.report.figures.writing import ENDINGS, write_figure
from steelyard.report.view import RunView


def write_curves(folder: Path, document: Comparison, path: Path) -> None:
    """Write the curves of a run as a picture (.svg, .png, .pdf) or as numbers (.csv), by the ending of its name."""
    if path.suffix in ENDINGS:
        write_figure(draw(RunView([folder]), "accuracy"), path)
        return
    if path.suffix != ".csv":
        raise UserError(f"--curves: got '{path}'; allowed: a file name that ends in .svg, .png, .pdf or .csv")
    try:
        files.write(path, curves_csv(document).encode("utf-8"))
    except OSError as error:
        raise UserError(f"--curves: {path} cannot be written: {error.strerror}; allowed: a writable file") from error
