"""`steelyard model`, `predict` and `test`: a model that leaves its run, and what it says of new rows.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import counted, new_file, printable, told_as
from steelyard.base.files import write
from steelyard.base.logs import doing, logger
from steelyard.base.measures import measure_of
from steelyard.cli.options import Format, FormatOption, HeadOption, KeysOption, TrustOption, asking
from steelyard.cli.printing import emit
from steelyard.report.rendering import Copied, Table

if TYPE_CHECKING:
    from steelyard.models.document import Tested
    from steelyard.models.folder import Model
    from steelyard.models.recommender import Recommender

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a model (`steelyard model`).")]
FilesArgument = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Tables, a folder or .zip of images, an .npz file, or texts.")
]
SiteOption = Annotated[
    str | None, typer.Option("--site", help="Fill and scale a table as those of this site, which trained.")
]

_log = logger(__name__)


def model(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The model's own folder; it must not be there yet.")],
    rule: Annotated[
        str | None, typer.Option("--rule", help="Which rule's (default: the recommended one, or the run's main one).")
    ] = None,
    round: Annotated[
        str | None,
        typer.Option("--round", help="last, best or a number. Default: the best where rounds.keep is best, else last."),
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Whose own model, of an algorithm that gives clients their own.")
    ] = None,
    adapt: Annotated[
        list[Path] | None,
        typer.Option(
            "--adapt", help="Rows of a site that did not take part: train the model on for it.", metavar="FILE"
        ),
    ] = None,
    keys: KeysOption = None,
    head: HeadOption = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Take a model out of a run, with all that new rows need; ends with 1 where the run was changed.

    The folder needs neither the run nor its data: weights (safetensors), model.json, and card.md to read.
    """
    from steelyard.models.taking import ChangedRun, take

    with doing("taking the model"):
        try:
            found = take(run, rule, round, ask=asking(trust), keys=keys, head=head, client=client, adapt=adapt or ())
        except ChangedRun as changed:
            _log.error(str(changed))
            raise typer.Exit(1) from None
    saved(found, out, format)


def saved(found: Model | Recommender, out: Path, format: Format) -> None:
    """Write a model into its folder, and say what was taken and what to do with it."""
    folder, origin = found.save(out), found.document.origin
    lines = [
        f"model of {origin.rule}, seed {origin.seed}: {origin.chosen}",
        *([origin.own] if origin.own else []),
        f"written to {folder}",
        f"next: {found.use.format(shlex.quote(str(folder)))}",
    ]
    emit(found.document, format, [Copied(printable(line)) for line in lines])


def predict(
    model: ModelArgument,
    files: FilesArgument,
    out: Annotated[Path, typer.Option("--out", help="The new .csv with a row for each row, image or text.")],
    site: SiteOption = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Let a model say what new rows are: classes with probabilities, labels, values, or risks."""
    from steelyard.models.folder import load
    from steelyard.models.predicting import Predicted, csv_lines

    new_file(out)
    with doing("predicting"):
        frame = load(model, asking(trust)).predict(files, site=site)
        with told_as(f"--out: {out} cannot be written", "a new file"):
            write(out, csv_lines(frame))
    notes = frame.attrs["notes"]
    document = Predicted(rows=len(frame), columns=[str(name) for name in frame.columns], out=str(out), notes=notes)
    emit(document, format, [Copied(printable(f"{counted(len(frame), 'row')}: {out}"))])


def on_new_rows(
    model: ModelArgument,
    files: FilesArgument,
    label: Annotated[
        str | None, typer.Option("--label", help="The column to predict (default: as in training).")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="A column of sites or groups (default: that of the sites in training).")
    ] = None,
    site: SiteOption = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Test a model on new rows whose labels are known: the run's measures with 95% intervals, of all and by group."""
    from steelyard.models.folder import load

    with doing("testing"):
        found = load(model, asking(trust)).test(files, label, by=by, site=site)
    for note in found.notes:
        _log.warning(note)
    emit(found, format, [_table(found)])


def _table(found: Tested) -> Table:
    # A group of one class has no ROC AUC: each figure goes under its own heading.
    measures = list(dict.fromkeys(figure.measure for group in found.groups for figure in group.figures))
    headings = (found.by or "rows", "rows", *(measure_of(measure).heading for measure in measures))
    rows: list[tuple[str, ...]] = []
    for group in found.groups:
        cells = {figure.measure: figure.shown for figure in group.figures}
        rows.append((group.name, f"{group.rows:,}", *(cells.get(measure, "–") for measure in measures)))
    return Table("Tests on new rows, with 95% intervals where they are known", headings, tuple(rows))
