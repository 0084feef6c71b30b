"""What users get: the Result of a run, with its figures, tables and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.base.errors import UserError, expect, path_of
from steelyard.base.measures import Estimate, estimate
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment
from steelyard.report.rendering import as_text
from steelyard.report.result import Comparison, computed
from steelyard.report.tables import main_table
from steelyard.runs.history import History

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

    from steelyard.models.folder import Model
    from steelyard.models.recommender import Recommender
    from steelyard.report.view import RunView


MOST_RULES = 12
"""Rules that a prompt shows."""


@dataclass(frozen=True, repr=False)
class Result:
    """A run that has ended: its folder and everything recorded in it; printed, it is a short table.

    >>> result = steelyard.Result("runs/mine")
    >>> result.table, result.history.rounds  # data frames

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
    def comparison(self) -> Comparison:
        """Which rule to use, and the figures of every rule; the same that `steelyard table --format json` prints."""
        return computed(self.history, self.experiment)

    @property
    def table(self) -> pd.DataFrame:
        """The table behind the recommendation as a data frame: what decides, the difference to the baseline, and p."""
        found = self.comparison.tested()
        name = found.measure.replace(" ", "_")
        none = estimate([])
        rows = {
            row.rule: {name: row.value, "difference": row.difference or none, "p": row.p_holm} for row in found.rules
        }
        return _frame(rows)

    @property
    def summary(self) -> pd.DataFrame:
        """Every figure as a data frame: a row for each rule; NAME_low and NAME_high bound its interval."""
        return _frame({rule.rule: rule.figures for rule in self.comparison.rules})

    def _view(self) -> RunView:
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.view import RunView

        return RunView([self.history], documents=[self.comparison])

    def plot(
        self, kind: str = "accuracy", *, rule: str | None = None, seed: int | None = None, client: str | None = None
    ) -> alt.TopLevelMixin:
        """Draw a figure of the run as an Altair chart; `steelyard.report.figures.KINDS` lists the kinds.

        Figures of one rule take the main one unless `rule` (and `seed`) name another; "client" needs a client's name.
        """
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.figures import KINDS, draw

        chart = draw(self._view(), kind, rule=rule, seed=seed, client=client)
        if chart is None:
            raise UserError(f"plot: nothing to show for '{kind}'. {KINDS[kind].empty}")
        return chart

    def model(
        self,
        rule: str | None = None,
        round: int | str | None = None,
        *,
        client: str | None = None,
        adapt: Path | str | None = None,
        trust: bool = False,
    ) -> Model:
        """Take a rule's model out of the run: the recommended rule's, or the main one's, unless one is named.

        `round` is "last", "best", or a number, of rounds whose model the run keeps; None: the best where the run keeps
        it, else the last. `client` names whose own model, of a personal algorithm; `adapt` is a file with the rows of a
        newcomer, for whom the model is trained on. A run with a network of its own needs `trust=True`: it is run.

            >>> result.model().save("heart-model")

        Raises:
            UserError: the run was changed or keeps no such model, or the rule is not known.
        """
        expect("rule", rule, (str, type(None)), "the name of a rule, or None")
        # For speed of start: few who look at a run take its model, which needs torch.
        from steelyard.models.folder import Model, untrusted
        from steelyard.models.taking import take

        at, files = None if round is None else str(round), () if adapt is None else (Path(adapt),)
        found = take(self.folder, rule, at, client=client, adapt=files, ask=None if trust else untrusted)
        if not isinstance(found, Model):
            raise UserError(f"{self.folder}: is of a recommender; allowed: Result.recommender")
        return found

    def recommender(self, rule: str | None = None, *, user: str | None = None) -> Recommender:
        """Take a rule's recommender out of the run; `user`: with the own part of this user, for her alone.

            >>> result.recommender(user="u00").save("for-u00")

        Raises:
            UserError: the run was changed or is of no recommender, or the rule or the user is not known.
        """
        # For speed of start: few who look at a run take its model, which needs torch.
        from steelyard.models.recommender import Recommender
        from steelyard.models.taking import take

        if not isinstance(found := take(self.folder, rule, client=user), Recommender):
            raise UserError(f"{self.folder}: is of no recommender; allowed: Result.model")
        return found

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file that opens without a network, and return where; default: in the folder."""
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.html import write_report

        target = self.folder / files.REPORT if path is None else path_of(path, "report", "the path of an .html file")
        write_report(self._view(), target)
        return target

    def _repr_html_(self) -> str:
        """What a notebook shows: the result in a sentence, the main table, the curves; no scripts, no network."""
        # For speed of start: only those who look at figures need what draws them.
        from steelyard.report.html import notebook_html

        try:
            return notebook_html(self._view())
        except (UserError, OSError) as problem:
            return f"<p>{escape(str(problem))}</p>"

    def __repr__(self) -> str:
        """The rules and their figures as a short table, then which rule to use; what a prompt shows."""
        try:
            table = main_table(self.comparison)
            left = len(table.rows) - MOST_RULES
            more = [f"and {left} more rules"] if left > 0 else []
            text = as_text(replace(table, rows=table.rows[:MOST_RULES]))
            return "\n".join([text, *more, f"run stored in {self.folder}", self.comparison.tested().sentence])
        except (UserError, OSError) as problem:
            # A folder that was moved or emptied is no reason for a traceback at a prompt.
            return f"Result({str(self.folder)!r}): {problem}"


def _frame(rows: Mapping[str, Mapping[str, Estimate | float | None]]) -> pd.DataFrame:
    """Return estimates as a data frame, each in three columns; what is not known is NaN."""
    # For speed of start: not everyone who opens a run reads its data frames.
    import pandas as pd

    def cells(name: str, value: Estimate | float | None) -> dict[str, float]:
        if not isinstance(value, Estimate):
            return {name: math.nan if value is None else value}
        return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}

    flat = {rule: {k: v for item in row.items() for k, v in cells(*item).items()} for rule, row in rows.items()}
    return pd.DataFrame.from_dict(flat, orient="index").rename_axis("rule")
