"""Reading experiments: TOML files, recipes and run folders; every error names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import tomli_w

from steelyard.errors import UserError, brief, listed, nearest
from steelyard.experiment.anchoring import anchor
from steelyard.experiment.description import Description
from steelyard.experiment.kinds import kind_of
from steelyard.settings import change, parse, validated

RUN_FILE = "experiment.toml"
"""The file in a run's folder that holds its resolved experiment."""


def recipes() -> dict[str, Traversable]:
    """Return the ready experiments that come with the package, by name."""
    folder = resources.files("steelyard.recipes")
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


def source_text(name_or_file: str | Path) -> str:
    """Return the TOML text of a recipe or a file."""
    text, path = str(name_or_file), Path(name_or_file)
    ready = recipes()
    if text in ready:
        return ready[text].read_text(encoding="utf-8")
    if not _is_file(path):
        raise UserError(
            f"experiment {brief(text)}: no such recipe or file{nearest(text, ready)}; recipes: {listed(ready)}, "
            "or the path of a TOML file"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; allowed: a TOML file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as text: {error.strerror}; allowed: a TOML file") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name for any file
        return False


def read_document(
    name_or_file: str | Path, changes: Sequence[str] = (), seed: int | None = None, *, anchored: bool = True
) -> dict[str, Any]:
    """Return a recipe or file as plain values, with changes such as "rounds.count=50" applied; nothing is checked.

    Data that lie beside a file get their whole path, unless `anchored` is false.
    """
    document = parse(source_text(name_or_file), str(name_or_file))
    if anchored and str(name_or_file) not in recipes():
        anchor(document, Path(name_or_file).parent)
    for assignment in changes:
        change(document, assignment)
    if seed is not None:
        document["seed"] = seed
    return document


def build(document: Mapping[str, Any], where: str = "experiment") -> Description:
    """Check a document and return the experiment; the first thing wrong is named in one line."""
    return validated(kind_of(document.get("kind", "learning")), document, where)


def load(
    name_or_file: str | Path, changes: Sequence[str] = (), seed: int | None = None, *, anchored: bool = True
) -> Description:
    """Load a recipe or a TOML file with changes such as "rounds.count=50"; this is what `steelyard run` does.

    `anchored` = false keeps paths of data as they are written, for other machines to find in folders of their own.
    """
    return build(read_document(name_or_file, changes, seed, anchored=anchored), str(name_or_file))


def read_experiment(folder: Path) -> Description:
    """Return the experiment that a run folder describes."""
    path = folder / RUN_FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {RUN_FILE} here; allowed: a folder that `steelyard run` made")
    return build(parse(path.read_text(encoding="utf-8"), str(path)), str(path))


def to_toml(experiment: Description) -> str:
    """Write an experiment with every field resolved as TOML; reading it back gives the same experiment."""
    return tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True))
