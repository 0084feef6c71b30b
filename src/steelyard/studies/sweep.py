"""A sweep: an experiment over a grid of fields and rules, on a validation split; its points."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, cast

import numpy as np
from pydantic import Field, model_validator

from steelyard.base import files
from steelyard.base.errors import Stopped, UserError, brief, listed, nearest, told_as
from steelyard.base.logs import logger
from steelyard.base.measures import estimate, measure_of
from steelyard.base.settings import read_value, validated
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment, to_toml
from steelyard.experiment.parts import Part
from steelyard.experiment.rules import CHECKPOINTS, MOST_SEEDS, with_rules
from steelyard.report.curves import Curve, chain_of, read_curves
from steelyard.report.rendering import Block
from steelyard.report.statistics import FIGURES
from steelyard.report.tables import chain_line
from steelyard.rounds.weigh import Exploded, TooFewClients
from steelyard.runs.database import exists
from steelyard.runs.history import History
from steelyard.studies.study import (
    ALONE,
    AnyExperiment,
    Cell,
    How,
    Scalar,
    Study,
    finished,
    folder_for,
    go_on,
    run_or_resume,
)
from steelyard.studies.sweep_table import (
    BEST,
    PICTURE,
    RESULTS,
    SweepDocument,
    SweepRow,
    SweepTest,
    next_lines,
    show,
    sweep_csv,
    sweep_table,
)

SHARE = 0.1
"""The share of the training data that settings are chosen on, unless another is given."""
MANY, MOST = 100, 10_000
"""Points from which on a grid is asked about, and beyond which it is a slip of the keyboard."""
TEST = "test"
"""The folder in a sweep's folder with the run of the best point on the test set."""
_OWN = ("seed", "name", "description", "kind", "store", "tracking", "federate", "beside")
"""Fields and sections that are no settings to be chosen."""

_log = logger(__name__)

Grid = Mapping[str, Sequence[Scalar]]
"""Fields by dotted name, each with the values that it takes."""


class Sweep(Study):
    """A grid over an experiment; use `plan` to make one. Its cells are the points, with all rules and seeds each."""

    kind = "a sweep"
    file = files.SWEEP_FILE
    failed = ".diverged"

    measure: str
    validation: Annotated[float, Field(gt=0, lt=1)]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    rules: tuple[str, ...] = ()
    """As words; empty for the experiment's main rule."""
    over: dict[str, Annotated[tuple[Scalar, ...], Field(min_length=1)]]
    """The values of each field, in their order."""
    experiment: AnyExperiment
    """As it would run on the test set, before any value of the grid."""

    @model_validator(mode="after")
    def _check_measure(self) -> Self:
        known = measures_of(self.experiment)
        if not known:
            raise UserError(
                "partition.test: got 'none', which leaves nothing to choose by; allowed: local, held-out, or "
                "partition.server_report"
            )
        if self.measure not in known:
            hint = nearest(self.measure, known)
            raise UserError(f"measure: got {brief(self.measure)}{hint}; allowed: {listed(known)}")
        return self

    @property
    def less_is_better(self) -> bool:
        """Whether the best point has the lowest measure."""
        return self.measure in ("rounds-to-target", "loss") or measure_of(self.measure).less_is_better

    def cells(self) -> list[Cell]:
        """Return the points in order: the values of the last field change fastest."""
        points = [dict(zip(self.over, values, strict=True)) for values in product(*self.over.values())]
        digits = len(str(len(points)))
        return [
            Cell(f"{number:0{digits}d}-{_short(point)}".rstrip("-"), self.seeds, point)
            for number, point in enumerate(points, 1)
        ]

    def at(self, point: Mapping[str, Scalar]) -> Description:
        """Return the experiment at one point of the grid, on the test set, with all rules."""
        if self.rules:
            return with_rules(self.experiment.changed(point, where="--over"), self.rules)
        return self.experiment.changed({**point, "beside": {}}, where="--over")

    def described(self, cell: Cell) -> Description:
        """Return the experiment of a point, which tests on the validation split."""
        return self.at(cell.changes).on_validation(self.validation)

    def run(self, folder: Path, cell: Cell, how: How = ALONE) -> None:
        """Run a point; a learning rate at which training explodes is an answer, not a reason to stop the sweep."""
        try:
            super().run(folder, cell, how)
        except (Exploded, TooFewClients) as error:
            self.note_failure(folder, cell, error)

    def answer(self, folder: Path) -> SweepDocument:
        """Return every point that is done, the best first."""
        left: list[str] = []
        diverged: list[str] = []
        problems: list[str] = []
        rows: list[SweepRow] = []
        for cell in self.cells():
            if not self.ended(folder, cell):
                left.append(cell.folder)
                continue
            if files.is_file(self.failure(folder, cell)):
                diverged.append(cell.folder)
                none = [Figure(math.nan, exploded=True)] * len(cell.seeds)
                figures = dict.fromkeys(self._rules_of(folder / cell.folder), none)
            else:
                history = History(folder / cell.folder)
                figures = _figures(history, self.measure)
                if (chain := chain_of(history)).problem:
                    problems.append(f"{cell.folder}: {chain_line(chain)}")
            rows += [self._row(len(rows) + number, cell, *found) for number, found in enumerate(figures.items(), 1)]
        # Sorting is stable: of points that are alike, the one that comes first in the grid is the best.
        rows.sort(key=self._rank)
        return SweepDocument(
            folder=str(folder),
            measure=self.measure,
            measured=measured_name(self.experiment, self.measure),
            less_is_better=self.less_is_better,
            validation=self.validation,
            seeds=self.seeds,
            fields=tuple(self.over),
            rows=tuple(rows),
            best=rows[0] if rows and math.isfinite(rows[0].value.mean) else None,
            left=tuple(left),
            diverged=tuple(diverged),
            test=self._test(folder),
            problems=tuple(problems),
        )

    def parts(self, answer: SweepDocument) -> list[Block]:
        """Return the table, and what spoils it."""
        return [sweep_table(answer), *([answer.problems] if answer.problems else [])]

    def next_lines(self, answer: SweepDocument) -> Sequence[str]:
        """Return where the sweep lies, and how to run the best point on the test set."""
        return next_lines(answer)

    def csv(self, answer: SweepDocument) -> str:
        """Return a line for each point."""
        for problem in answer.problems:
            _log.warning(problem)
        return sweep_csv(answer)

    def _rules_of(self, run: Path) -> Sequence[str]:
        """Return the rules of a run that has no end; it may not have got as far as to have a folder."""
        return list(read_experiment(run).rules()) if exists(run) else self.rules or ["the main rule"]

    def _row(self, number: int, cell: Cell, rule: str, figures: Sequence[Figure]) -> SweepRow:
        return SweepRow(
            point=number,
            run=cell.folder,
            values=dict(cell.changes),
            rule=rule,
            seeds=self.seeds,
            value=estimate([each.value for each in figures]),
            unreached=sum(not each.reached for each in figures),
            diverged=any(each.exploded for each in figures),
            samples=min(each.samples for each in figures),
        )

    def _rank(self, row: SweepRow) -> tuple[float, ...]:
        if not math.isfinite(mean := row.value.mean):
            return (math.inf, 0.0)
        # A target that was not reached counts as the last round, and comes after one that was reached then.
        return (mean if self.less_is_better else -mean, row.unreached)

    def _test(self, folder: Path) -> SweepTest | None:
        """Return what the best point did on the test set, where it was run there."""
        if not finished(folder / TEST):
            return None
        ((rule, figures),) = _figures(History(folder / TEST), self.measure).items()
        row = self._row(0, Cell(TEST, self.seeds), rule, figures)
        return SweepTest(run=TEST, rule=rule, value=row.value, unreached=row.unreached)

    def write_files(self, folder: Path) -> SweepDocument:
        """Write the table, the figure and, where all runs are done, the best point as an experiment."""
        # For speed of start: only a sweep that has ended is drawn.
        from steelyard.report.figures import write_figure
        from steelyard.studies.charts import sweep_chart

        document = self.answer(folder)
        with told_as(f"{folder}: cannot be written", "a writable folder"):
            files.write(folder / RESULTS, sweep_csv(document).encode())
            if document.best is not None and not document.left:
                files.write(folder / BEST, best_toml(folder, document, document.best).encode())
        chart = sweep_chart(document)
        if chart is not None:
            write_figure(chart, folder / PICTURE)
        return document


class Figure(NamedTuple):
    """What a rule came to with one seed."""

    value: float
    reached: bool = True
    """Whether there was a round that reached the target, where one is measured."""
    exploded: bool = False
    samples: int = 0
    """On how many test samples it is the share of those that are right; 0 for other measures."""


def measured_name(experiment: Description, measure: str) -> str:
    """Return what a measure is called in headings: "score" is what the experiment scores by."""
    if measure == "worst10":
        return f"worst 10% of clients, {experiment.score_name}"
    return experiment.score_name if measure == "score" else experiment.measures.get(measure, measure)


_NAMES = {"score": "final", "accuracy": "final", "worst10": "worst_tenth"}
"""What tables call a measure."""


def _figures(history: History, measure: str) -> dict[str, list[Figure]]:
    """Return the measure of every rule of a run, seed by seed; nan where its model exploded."""
    experiment = read_experiment(history.folder)
    found: dict[str, list[Figure]] = {}
    for curve in read_curves(history):
        ended = (curve.rule, curve.seed) in history.ended
        figure = Figure(math.nan, exploded=True) if ended else _figure(history, experiment, curve, measure)
        found.setdefault(curve.rule, []).append(figure)
    return found


def _figure(history: History, experiment: Description, curve: Curve, measure: str) -> Figure:
    """Return a measure of the last model that was tested."""
    name = _NAMES.get(measure, measure.replace("-", "_"))
    if known := next((figure for figure in FIGURES if figure.name == name), None):
        value = known.of(curve, experiment.rounds)
        if measure != "rounds-to-target" or not math.isnan(value):
            counted = (known.measure or measure_of(experiment.score_name)).of_rows
            return Figure(value, samples=int(curve.rows.sum()) if name == "final" and counted else 0)
        return Figure(float(experiment.rounds.count or curve.rounds.max(initial=0)), reached=False)
    tested = history.tested(curve.rule, curve.seed, 0)
    last = tested.round == tested.round.max(initial=0)
    values = tested.loss if measure == "loss" else tested.metrics.get(experiment.measures.get(measure, measure))
    if values is None or not last.any():
        return Figure(math.nan)
    return Figure(float(np.average(values[last], weights=tested.samples[last])))


def best_toml(folder: Path, document: SweepDocument, best: SweepRow) -> str:
    """Return the best point of a sweep as an experiment file, on the test set and with its rule alone."""
    experiment = read_experiment(folder / best.run)
    fields = {experiment.validation_field: None, "seed": document.seeds[0]}
    found = to_toml(experiment.changed(fields, rules={best.rule: experiment.rules()[best.rule]}))
    chosen = ", ".join(f"{field} = {show(value)}" for field, value in best.values.items())
    result = f"{document.measured} {best.value.mean:.6g} on a validation split"
    return f"# Chosen by `steelyard sweep`: {' '.join(f'{chosen} {result}'.split())}.\n{found}"


def _short(point: Mapping[str, Scalar]) -> str:
    name = ",".join(f"{field.rpartition('.')[2]}={show(value)}" for field, value in point.items())
    return re.sub(r"[^A-Za-z0-9._=,-]+", "-", name)[:80]


def measures_of(experiment: Description) -> list[str]:
    """Return the measures by which settings of this experiment can be chosen."""
    local = ["score", *experiment.measures, "worst10", "rounds-to-target", "loss"]
    local += ["accuracy"] if experiment.score_name == "accuracy" else []
    figure = experiment.server_figure
    by_figure = {"rmse": ["server-mape"], "accuracy": ["server-accuracy", "server-macro-f1"]}
    server = by_figure.get(figure, [f"server-{figure.replace('_', '-')}"])
    return [*(local if experiment.clients_evaluate else []), *(server if experiment.reports_on_server else [])]


def plan(
    experiment: Description,
    over: Sequence[str] | Grid,
    *,
    rules: Sequence[str] = (),
    seeds: int = 1,
    measure: str = "score",
    validation: float | None = None,
    many: bool = False,
    part: Part | None = None,
) -> Sweep:
    """Return the sweep of an experiment over fields such as "training.learning_rate=0.05,0.1", every point checked.

    `validation` is the experiment's own, or a tenth, unless given. More than 100 points need `many`.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds: got {seeds}; allowed: a whole number from 1 to {MOST_SEEDS:,}")
    share = validation if validation is not None else experiment.validation or SHARE
    if not over and not rules:
        raise UserError("--over: got nothing; allowed: a field and its values, such as training.epochs=1,5, or --rules")
    base = experiment.on_validation(None)
    if "checkpoint_every" not in experiment.store.model_fields_set:
        base = base.changed({"store.checkpoint_every": max(1, experiment.rounds.count // CHECKPOINTS)})
    chosen = {"measure": measure, "validation": share, "rules": rules, "over": read_grid(over, base)}
    first = [experiment.seed + number for number in range(seeds)]
    found = validated(Sweep, {**chosen, "seeds": first, "experiment": base, "part": part}, "")
    count = math.prod(map(len, found.over.values())) * (len(with_rules(base, rules).rules()) if rules else 1)
    if count > MOST or (count > MANY and not many):
        allowed = f"at most {MOST:,}" if count > MOST else f"at most {MANY}, or --yes if you mean it"
        raise UserError(f"--over: a grid of {count:,} points; allowed: {allowed}")
    _check_points(found)
    _ = found.own
    return found


def _check_points(sweep: Sweep) -> None:
    """Build every point once, so that nothing is refused after hours; the same experiment twice is a slip."""
    seen: dict[str, str] = {}
    for cell in sweep.cells():
        described = sweep.at(cell.changes)
        where = ", ".join(f"{field}={show(value)}" for field, value in cell.changes.items())
        for rule, settings in described.rules().items():
            alone = described.model_copy(update={"weighing": settings, "beside": {}})
            text, point = alone.model_dump_json(), f"{where} {rule}".strip()
            if text in seen:
                raise UserError(f"--over: '{point}' is the same experiment as '{seen[text]}'; allowed: each point once")
            seen[text] = point


def read_grid(over: Sequence[str] | Grid, experiment: Description) -> Grid:
    """Read fields with values: texts such as "fpl.factors=10,20", or a mapping of names and lists from Python."""
    grid: dict[str, Sequence[Scalar]] = {}
    for field, values in over.items() if isinstance(over, Mapping) else map(_assignment, over):
        _check_field(field, experiment)
        if field in grid:
            raise UserError(f"--over: {field} is given twice; allowed: each field once, with all its values")
        grid[field] = values
    return grid


def _assignment(text: str) -> tuple[str, list[Scalar]]:
    """Read "field=value,value" as TOML would; where the values are no TOML, each is plain text or a value."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise UserError(
            f"--over: got {brief(text)}; allowed: section.field=value,value, such as training.learning_rate=0.05,0.1"
        )
    words = [word.strip() for word in values.split(",")]
    if not all(words):
        raise UserError(f"--over: got {brief(values)}, in which a value is empty; allowed: a value between all commas")
    try:
        return name.strip(), list(tomllib.loads(f"values = [{values}]")["values"])
    except (ValueError, RecursionError):
        return name.strip(), [read_value(word) for word in words]


def _check_field(field: str, experiment: Description) -> None:
    """Refuse fields that are no settings to be chosen, and those that hold more than one value."""
    first = field.partition(".")[0]
    if first in _OWN or field == experiment.validation_field:
        hint = {"seed": " (--seeds gives several)", "beside": " (--rules names rules)"}.get(first, "")
        hint = " (--validation gives the share)" if field == experiment.validation_field else hint
        raise UserError(f"--over: {field} is not a setting that a sweep can choose{hint}; allowed: other fields")
    value: Any = experiment.model_dump(mode="json")
    for key in field.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(cast("list[Any]", value)):
            value = value[int(key)]
        else:
            value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    if isinstance(value, list | dict):
        kind = "a section" if isinstance(value, dict) else "a list"
        raise UserError(f"--over: {field} is {kind}; allowed: fields that hold one value")


def sweep(planned: Sweep, out: str | Path | None = None, how: How = ALONE) -> Path:
    """Run every point of a sweep into a folder, which is returned; in a folder that holds the same sweep, go on."""
    name = f"{planned.experiment.name}-sweep"
    folder = folder_for(planned, out, planned.experiment, name)
    return go_on(Sweep.read(folder), folder, how)


def run_on_test(folder: Path, best: Description, *, progress: bool = False) -> None:
    """Run the experiment that a sweep has chosen on the test set, with the sweep's seeds, or go on with it."""
    target = folder / TEST
    if exists(target) and not _same_choice(read_experiment(target), best):
        raise UserError(f"{target}: holds a run of another choice; allowed: remove it and try again")
    try:
        run_or_resume(folder, Cell(TEST, Sweep.read(folder).seeds), best, How(progress))
    except KeyboardInterrupt:
        raise Stopped(folder) from None


def _same_choice(kept: Description, best: Description) -> bool:
    """Whether a run is that of an experiment; the share of clients that the run came to may have been left open."""
    rounds = (
        best.rounds
        if best.rounds.fraction is not None
        else best.rounds.model_copy(update={"fraction": kept.rounds.fraction})
    )
    return kept.model_dump() == best.model_copy(update={"rounds": rounds}).model_dump()
