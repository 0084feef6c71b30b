"""What users call: an Experiment that is loaded, run, compared and swept, and a run that is resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, brief, expect, path_of, texts_of
from steelyard.base.marks import Code, marked
from steelyard.base.settings import Section, explain
from steelyard.base.usercode import hand_over_as, is_handed_over
from steelyard.experiment import running
from steelyard.experiment.data_check import DataCheck, check_data
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import Ask, load, read_experiment, refuse
from steelyard.experiment.recommend import RecommendDescription
from steelyard.report.rendering import as_text
from steelyard.result import Result
from steelyard.rounds.progress import shown_by_default, watching
from steelyard.studies.study import MOST_JOBS, How, Scalar
from steelyard.studies.sweep import Sweep, plan
from steelyard.studies.sweep import sweep as run_sweep
from steelyard.studies.sweep_table import BEST, SweepDocument, sweep_table

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

    from steelyard.data.dataset import DatasetOrSeeded


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A sweep that has ended: its folder, its points as a table, the best as an experiment; it prints as the table.

    >>> found = steelyard.SweepResult("runs/my-sweep")
    >>> found.best.run()  # on the test set, once

    Raises:
        UserError: `folder` is no path; when it is read, it holds no sweep, or no point has a figure
            (`best`, `plot`).
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_of(self.folder, "SweepResult", "the folder of a sweep"))

    @cached_property
    def answer(self) -> SweepDocument:
        """Every point with its measure, the best first; the same that `steelyard sweep --format json` prints."""
        return Sweep.read(self.folder).answer(self.folder)

    @property
    def table(self) -> pd.DataFrame:
        """The points as a data frame, the best first: their fields, rule, measure and its interval."""
        # For speed of start: not everyone who opens a sweep reads its data frame.
        import pandas as pd

        measured = self.answer.measured
        rows = [
            {**row.values, "rule": row.rule, measured: row.value.mean, "low": row.value.low, "high": row.value.high}
            for row in self.answer.rows
        ]
        return pd.DataFrame(rows, index=[row.point for row in self.answer.rows]).rename_axis("point")

    @cached_property
    def best(self) -> Experiment | RecommendExperiment:
        """The best point as an experiment that runs on the test set."""
        if not files.is_file(self.folder / BEST):
            raise UserError(f"{self.folder}: no point is the best: none has a figure, or runs are left to do")
        return runnable(load(self.folder / BEST))

    def plot(self) -> alt.LayerChart:
        """Draw the measure over the grid as an Altair chart."""
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.studies.charts import sweep_chart

        chart = sweep_chart(self.answer)
        if chart is None:
            raise UserError("plot: no point of the sweep has a figure")
        return chart

    def __repr__(self) -> str:
        """The points as a table, the best first."""
        try:
            return as_text(sweep_table(self.answer))
        except (UserError, OSError) as problem:
            # A folder that was moved or emptied is no reason for a traceback at a prompt.
            return f"SweepResult({str(self.folder)!r}): {problem}"


class _Runnable:
    """What can be done with an experiment of any kind."""

    if not TYPE_CHECKING:  # type checkers and editors see the fields, which pydantic declares

        def __init__(self, **fields: Any) -> None:
            if not isinstance(fields.get("data", {}), Mapping | Section):
                raise UserError(
                    f"data: got {type(fields['data']).__name__}; allowed: the fields of a [data] section; data that "
                    "you hold: Experiment(data={'source': 'memory'}, ...).run(dataset=steelyard.in_memory(...))"
                )
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise UserError(explain(error, type(self))) from None

    @classmethod
    def load(
        cls,
        name_or_file: str | Path,
        changes: Sequence[str] | Mapping[str, Any] = (),
        seed: int | None = None,
        *,
        trust: bool = False,
    ) -> Experiment | RecommendExperiment:
        """Load a recipe or a TOML file; `changes` are assignments such as "rounds.count=50", or fields as in `changed`.

        A file that names code of its own (criteria, a model, a loss) needs `trust=True`: running it runs that code.

            >>> experiment = steelyard.Experiment.load("quickstart", ["rounds.count=5"], seed=3)
            >>> result = experiment.run()

        Raises:
            UserError: there is no such recipe or file, a change names no field or a value that it does not
                take, or the file names code and `trust` is not given.
        """
        path_of(name_or_file, "Experiment.load", "a recipe's name, or the path of a TOML file")
        ask = _asking(trust, "Experiment.load(..., trust=True)")
        if isinstance(changes, Mapping):
            return runnable(load(name_or_file, (), seed, ask).changed(changes))
        texts = texts_of(changes, "changes", '["rounds.count=50"], or {"rounds.count": 50}')
        return runnable(load(name_or_file, texts, seed, ask))

    def run(
        self,
        out: str | Path | None = None,
        *,
        dataset: DatasetOrSeeded | None = None,
        progress: bool | None = None,
        accept: Sequence[str] = (),
    ) -> Result:
        """Run the experiment and return its result.

        `dataset` hands over data built with `steelyard.in_memory`, or a function that returns them for a seed.
        `progress` shows how far it is; by default in a notebook and on a terminal. `accept` names findings of
        `steelyard.check` that are no reason to stop.

            >>> result = steelyard.Experiment(data={"source": "memory"}, partition={"clients": 4}).run(
            ...     dataset=steelyard.in_memory(features, labels))  # features [rows, columns], labels [rows]

        Raises:
            UserError: fields do not fit each other or the data, `out` holds a run already, or `dataset` is
                missing or not asked for.
        """
        out, shown = _place(out), _shown(progress)
        with watching(shown):
            chosen = _accepted(accept)
            return Result(running.run(_described(self), out=out, dataset=dataset, progress=shown, accept=chosen))

    def compare(
        self,
        rules: str | Sequence[str] | None = None,
        seeds: int = 1,
        out: str | Path | None = None,
        *,
        dataset: DatasetOrSeeded | None = None,
        progress: bool | None = None,
        accept: Sequence[str] = (),
    ) -> Result:
        """Run several rules on the same cohorts and first models, with some seeds; the result prints as the answer.

        Rules are written as for `steelyard compare`; without any, each criterion, every order of them, and online.

            >>> result = steelyard.Experiment.load("quickstart").compare(["fedavg", "VP>LD>DS"], seeds=3)
            >>> result.comparison.recommendation.sentence

        Raises:
            UserError: as in `run`, and where a rule is not known or cannot run on these data.
        """
        out, shown, words = _place(out), _shown(progress), _rules(rules)
        expect("seeds", seeds, int, "a whole number from 1 on")
        with watching(shown):
            options: dict[str, Any] = {"dataset": dataset, "progress": shown, "accept": _accepted(accept)}
            return Result(running.compare(_described(self), words, seeds, out=out, **options))

    def sweep(
        self,
        over: Mapping[str, Sequence[Scalar]],
        rules: str | Sequence[str] | None = None,
        seeds: int = 1,
        measure: str = "score",
        out: str | Path | None = None,
        *,
        validation: float | None = None,
        jobs: int = 1,
        dataset: DatasetOrSeeded | None = None,
        progress: bool | None = None,
    ) -> SweepResult:
        """Run a grid over fields, {"training.learning_rate": [0.05, 0.1]}, and rules, on a validation split.

        Called again with the same `out`, it goes on where it stopped. The test set is not used: `result.best.run()`
        does that once, with what was chosen.

            >>> found = steelyard.Experiment.load("quickstart").sweep({"training.learning_rate": [0.05, 0.1]})
            >>> found.best.run()

        Raises:
            UserError: as in `compare`, and where `over` names no field, a value is not taken, or `out` holds
                another sweep.
        """
        out, shown = _place(out), _shown(progress)
        expect("over", over, Mapping, 'fields with their values, such as {"training.epochs": [1, 5]}')
        expect("seeds", seeds, int, "a whole number from 1 on")
        expect("measure", measure, str, "the name of a measure, such as 'score'")
        expect("validation", validation, (int, float, type(None)), "a share between 0 and 1, or None")
        if validation is not None and not 0 < validation < 1:
            raise UserError(f"validation: got {brief(validation)}; allowed: a share between 0 and 1, or None")
        for field in over:
            expect("over", field, str, "fields by name, such as 'training.epochs'")
        expect("jobs", jobs, int, f"a whole number from 1 to {MOST_JOBS}")
        if not 1 <= jobs <= MOST_JOBS:
            raise UserError(f"jobs: got {brief(jobs)}; allowed: a whole number from 1 to {MOST_JOBS}")
        planned = plan(
            _described(self),
            over,
            rules=_rules(rules),
            seeds=seeds,
            measure=measure,
            validation=validation,
            many=True,
        )
        with watching(shown):
            folder = run_sweep(planned, out, How(shown, jobs=jobs, dataset=dataset))
            planned.write_files(folder)
        return SweepResult(folder)


def _place(out: object) -> Path | None:
    return None if out is None else path_of(out, "out", "the path of a new folder")


def _shown(progress: object) -> bool:
    expect("progress", progress, (bool, type(None)), "True, False, or None for the default")
    return shown_by_default() if progress is None else bool(progress)


def _accepted(accept: object) -> tuple[str, ...]:
    return texts_of(accept, "accept", 'a list of findings, such as ["labels-spelled-alike"]')


def _rules(rules: object) -> tuple[str, ...]:
    """Return rules as words; one text may hold several, as on the command line, and an empty list is a slip."""
    if rules is None:
        return ()
    found = (rules,) if isinstance(rules, str) else texts_of(rules, "rules", 'a list of rules, such as ["DS", "LD>DS"]')
    if not found:
        raise UserError("rules: got an empty list; allowed: at least one rule, or None for the default ones")
    return found


def _described(experiment: _Runnable) -> Description:
    assert isinstance(experiment, Description)
    return experiment


class Experiment(_Runnable, LearningDescription):
    """One description of a run: data, partition, model, local training, rounds, and the rule that weighs clients.

    Build it in Python, or load a recipe or TOML file with `Experiment.load("quickstart")`; `run()` runs it.

        >>> experiment = steelyard.Experiment(rounds={"count": 5}, weighing={"criteria": ["LD", "DS"]})
        >>> experiment.run("runs/mine")

    Raises:
        UserError: a field is unknown or holds what it does not take; the line names it and what is allowed.
    """


class RecommendExperiment(_Runnable, RecommendDescription):
    """One description of a federated recommender: interactions, split, mode, π, rounds or epochs, the rule.

    Load a recipe with `Experiment.load("fpl-ml1m")`; `run()` runs it through the same loop as every other kind.

        >>> experiment = steelyard.RecommendExperiment(interactions={"path": "ratings.tsv"}, rounds={"epochs": 3})
        >>> experiment.run("runs/recommender")

    Raises:
        UserError: a field is unknown, missing or holds what it does not take.
    """


def runnable(described: Description) -> Experiment | RecommendExperiment:
    """Return a description as the experiment that users run and compare."""
    fields = dict(described)
    if isinstance(described, RecommendDescription):
        return RecommendExperiment.model_construct(described.model_fields_set, **fields)
    return Experiment.model_construct(described.model_fields_set, **fields)


def resume(
    folder: str | Path,
    *,
    dataset: DatasetOrSeeded | None = None,
    progress: bool | None = None,
    trust: bool = False,
    accept_changes: bool = False,
    given: Sequence[Callable[..., Any]] = (),
) -> Result:
    """Resume a stopped simulation from its last complete checkpoint, bit-identically.

    A run whose folder names code of its own needs `trust=True`; models and losses that were handed over from Python
    are handed over again as `given`. An experiment, code, data or a checkpoint that are not as the run left them are
    refused, unless accepted.

        >>> result = steelyard.resume("runs/mine")
        >>> result.comparison.status

    Raises:
        UserError: `folder` holds no run, or what was changed since is not accepted.
    """
    folder, shown = path_of(folder, "resume", "the folder of a run"), _shown(progress)
    if not isinstance(given, list | tuple) or not all(callable(function) for function in given):
        raise UserError(f"given: got {brief(given)}; allowed: a list of the functions that were handed over")
    for name in named_in_python(folder):
        for function in given:
            hand_over_as(name, function)
    ask = _asking(trust, "steelyard.resume(folder, trust=True)")
    with watching(shown):
        folder = running.resume(folder, dataset=dataset, progress=shown, ask=ask, accept_changes=accept_changes)
        return Result(folder)


def check(
    experiment: str | Path | Experiment | RecommendExperiment,
    *,
    dataset: DatasetOrSeeded | None = None,
    trust: bool = False,
) -> DataCheck:
    """Say what is wrong with an experiment's data, each site alone and all against each other; nothing is trained.

    `run` does the same first and refuses what is certain. Data that are handed over are shared out, and what needs the
    names of columns is left out.

        >>> looked = steelyard.check("hospitals")
        >>> [finding.sentence for finding in looked.findings if finding.level == "error"]

    Raises:
        UserError: there is no such recipe or file, or it is no experiment.
    """
    if not isinstance(experiment, _Runnable):
        experiment = Experiment.load(experiment, trust=trust)
    return check_data(_described(experiment), dataset)


def named_in_python(folder: str | Path) -> list[str]:
    """Return the names in a run's experiment that stand for functions handed over from Python."""
    described = read_experiment(Path(folder))
    names = (name for _, mark, name, _ in marked(type(described), described, Code) if mark.among_names)
    return [name for name in names if ":" in name and not name.rpartition(":")[0].endswith(".py")]


def _asking(trust: bool, allowed: str) -> Ask | None:
    if trust:
        return None

    def ask(where: str, code: Mapping[str, str]) -> None:
        unknown = {field: name for field, name in code.items() if not is_handed_over(name)}
        if unknown:
            refuse(where, unknown, f"call {allowed}")

    return ask
