"""What users get: the Result of a run, with its figures, tables and reports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.base.errors import UserError, path_of
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment
from steelyard.report.comparison import compare_run
from steelyard.report.result import Comparison, Summary
from steelyard.report.summary import short_account, summarise
from steelyard.runs.history import History

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True, repr=False)
class Result:
    """A run that has ended: its folder and everything recorded in it; printed, it is a short table.

    >>> result = steelyard.Result("runs/mine")
    >>> result.summary["status"], result.history.rounds  # a word, a data frame

    Raises:
        UserError: `folder` is no path; when a figure is first read, the folder holds no run.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_of(self.folder, "Result", "the folder of a run"))

    @cached_property
    def experiment(self) -> Description:
        """The experiment that the run's folder describes, with every field resolved."""
        return read_experiment(self.folder)

    @cached_property
    def history(self) -> History:
        """Data frames of the run: rounds, clients, evaluations."""
        return History(self.folder)

    @cached_property
    def summary(self) -> Summary:
        """The final figures as one document; the same that `steelyard run --format json` prints."""
        return summarise(self.folder, self.experiment)

    @cached_property
    def table(self) -> Comparison:
        """The rules compared, as one document; the same that `steelyard table --format json` prints."""
        return compare_run(self.folder, self.experiment)

    def plot(
        self, kind: str = "accuracy", *, rule: str | None = None, seed: int | None = None, client: str | None = None
    ) -> alt.TopLevelMixin:
        """Draw a figure of the run as an Altair chart; `steelyard.report.figures.KINDS` lists the kinds.

        Figures of one rule take the main one unless `rule` (and `seed`) name another; "client" needs a client's name.
        """
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.figures import KINDS, draw
        from steelyard.report.view import RunView

        chart = draw(RunView([self.history]), kind, rule=rule, seed=seed, client=client)
        if chart is None:
            raise UserError(f"plot: nothing to show for '{kind}'. {KINDS[kind].empty}")
        return chart

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file that opens without a network, and return where; default: in the folder."""
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.html import write_report
        from steelyard.report.view import RunView

        target = self.folder / files.REPORT if path is None else path_of(path, "report", "the path of an .html file")
        write_report(RunView([self.history]), target)
        return target

    def _repr_html_(self) -> str:
        """What a notebook shows: the result in a sentence, the main table, the curves; no scripts, no network."""
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.html import notebook_html
        from steelyard.report.view import RunView

        try:
            return notebook_html(RunView([self.history]))
        except (UserError, OSError) as problem:
            return f"<p>{escape(str(problem))}</p>"

    def __repr__(self) -> str:
        """The rules and their figures as a short table; what a notebook or a prompt shows."""
        try:
            return short_account(self.summary)
        except (UserError, OSError) as problem:
            # A folder that was moved or emptied is no reason for a traceback at a prompt.
            return f"Result({str(self.folder)!r}): {problem}"
