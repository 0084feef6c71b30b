"""Which figures there are, one list for the page, the report, the notebook and the files for a paper; writing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from altair.utils.schemapi import debug_mode

from steelyard.base import files
from steelyard.base.errors import UserError, listed, nearest, told_as
from steelyard.report.figures import curves, data, weights
from steelyard.report.figures.look import Chart, theme
from steelyard.report.result import Comparison, VegaLite
from steelyard.report.tables import curves_csv
from steelyard.report.view import RunView


@dataclass(frozen=True)
class Kind:
    """One figure: how it is called, what it is about, and what must be chosen to draw it."""

    name: str
    title: str
    caption: str
    empty: str
    """What to say, and what to do, where a run has nothing to show for it."""
    of: Literal["view", "federation", "client"]
    """view: all rules together; federation: one rule with one seed; client: one client under one rule and seed."""
    make: Callable[..., Chart | None]

    def drawn(self, view: RunView, *of: object) -> Chart | None:
        """Return the chart of what the figure is about: a view, with a federation and a client where it has them.

        The view keeps it, so that a report and its files draw it once; charts of single clients are too many to keep.
        """
        key = (self.name, *of)
        if key in view.charts:
            return view.charts[key]
        # Altair would check every part of a chart against its schema when it is made; the tests do that for the whole.
        with debug_mode(False):
            chart = self.make(view, *of)
        if self.of != "client":
            view.charts[key] = chart
        return chart


_LIST = (
    Kind(
        "accuracy",
        "Score, round by round",
        "Over the test samples of all clients.",
        "No round has been tested on clients.",
        "view",
        curves.accuracy,
    ),
    Kind(
        "time",
        "Score against simulated time",
        "Over the test samples of all clients, by the devices' clock.",
        "The devices of this run have no clock; a [clock] section gives them one.",
        "view",
        curves.over_time,
    ),
    Kind(
        "bytes",
        "Score against what was sent",
        "Over the test samples of all clients; models and vectors to and from those that trained, without tests.",
        "How much was sent is not known of this run.",
        "view",
        curves.over_bytes,
    ),
    Kind(
        "server",
        "On the server's rows",
        "The score on rows of the server that no client holds.",
        "The server of this run has no rows that report; partition.server_report = 'apart' gives it some.",
        "view",
        curves.server_score,
    ),
    Kind(
        "macro-f1",
        "Macro F1 on the server's rows",
        "The mean over the classes, rare ones included.",
        "The server of this run reports no F1 of each class.",
        "view",
        curves.macro_f1,
    ),
    Kind(
        "class-f1",
        "F1 of each class, rule by rule",
        "On the server's rows; a class that a rule misses stays low.",
        "The server of this run reports no F1 of each class.",
        "view",
        curves.class_f1,
    ),
    Kind(
        "adapters",
        "What weighing the adapters lost",
        "Of the weighted sum of their products, less is better.",
        "No rule of this run weighs low-rank adapters as products; algorithm.name = 'flexlora' does.",
        "view",
        curves.lost,
    ),
    Kind(
        "flawed",
        "What flawed clients weighed",
        "The share of each round's weight that they got.",
        "No client of this run is flawed; a [[flaws]] section makes some worth less.",
        "view",
        curves.flawed_weight,
    ),
    Kind(
        "targets",
        "Rounds to target",
        "Further left is faster, further up reaches more devices.",
        "No rule reached a target; rounds.targets names others.",
        "view",
        curves.targets,
    ),
    Kind(
        "devices",
        "Device by device",
        "What each device gets from the model after the last round.",
        "No device has been tested yet.",
        "view",
        data.devices,
    ),
    Kind(
        "weights",
        "Who counted, when",
        "The weight of each client in each round; no colour: it was not asked.",
        "No client was weighed under this rule, or all were asked in every round and weighed the same.",
        "federation",
        weights.weights,
    ),
    Kind(
        "contributions",
        "What each client added",
        "By how much it made the model better, with a 95 % interval; left of the line it made it worse.",
        "It was not measured; [contributions], or `steelyard contributions` afterwards, finds it out.",
        "federation",
        weights.contributed,
    ),
    Kind(
        "criteria",
        "What decided",
        "Each criterion, as normalised over the cohort, against the weight of the update.",
        "No criterion was measured under this rule.",
        "federation",
        weights.criteria,
    ),
    Kind(
        "listening",
        "Who listens to whom",
        "How much of each other's models each client takes into its own; the mean over all rounds.",
        "Under this rule clients do not weigh each other; fedfomo lets them.",
        "federation",
        weights.listening,
    ),
    Kind(
        "orders",
        "Priority orders",
        "Which order each round kept, and which it tested.",
        "This rule keeps its order; choose one that adjusts it, or run steelyard compare with --rules online.",
        "federation",
        weights.orders,
    ),
    Kind(
        "classes",
        "Class by class",
        "F1 of each class on the server's rows, and its weight in an adaptive loss.",
        "The server of this run reports no F1 of each class.",
        "federation",
        weights.classes,
    ),
    Kind(
        "split",
        "Samples and classes",
        "Training samples of each client, and their classes where the run knows them.",
        "No client has sent its number of samples yet.",
        "federation",
        data.split,
    ),
    Kind(
        "client",
        "One client",
        "Its weight, its criteria and its own score.",
        "This client was neither asked nor tested under this rule.",
        "client",
        data.client,
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _LIST}
"""The figures by name, in the order in which a report shows them."""


def draw(
    view: RunView, kind: str, *, rule: str | None = None, seed: int | None = None, client: str | None = None
) -> Chart | None:
    """Draw one figure as an Altair chart; None where the runs have nothing to show for it.

    `rule` is a label of the view and `seed` one of its seeds, for figures of one rule; by default those of the
    main rule, or of the first that has something to show.
    """
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


def spec(chart: Chart) -> VegaLite:
    """Return a chart as its Vega-Lite document, without a look of its own: give it `theme` as configuration."""
    # Altair checks a chart against its schema, which takes longer than all else; the tests do that once for every kind.
    document: VegaLite = chart.to_dict(validate=False)
    document.pop("config", None)
    return document


# Files for papers and slides, made without a browser or a network.


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
