"""Reading experiments: TOML files, recipes and run folders; every error names the field. Where a new run goes."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import tomli_w

from steelyard.base import files
from steelyard.base.errors import UserError, brief, empty_folder, listed, nearest, told_as, writable
from steelyard.base.files import RUN_FILE as RUN_FILE
from steelyard.base.files import SET_UP
from steelyard.base.marks import Code, DataFile, MarkT, marked
from steelyard.base.settings import PrintedName, change, parse, validated
from steelyard.base.usercode import SHIPPED, app_is_loaded
from steelyard.experiment.description import READING, Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.recommend import RecommendDescription
from steelyard.runs.database import exists, instead_of_a_run
from steelyard.weighing.rule import WeighingSettings

FILE = "file"
"""What stands for the framework of a federation that was read from a file."""
SWARM = "NVFlare"
"""Whose swarms' sites write journals."""


class RecordedDescription(Description):
    """What a recorded federation says of itself, in place of an experiment: it can be looked at, and not run here."""

    kind: Literal["recorded"] = "recorded"
    framework: PrintedName = "Flower"
    """Who runs the federation: "Flower", "NVFlare", or "file" for one that was imported."""
    measure: PrintedName = "accuracy"
    """What the clients' scores are in their tests of a model."""
    keep_models: bool = False
    """Whether the folder holds the newest models; their digests are in its chain in any case."""

    def check_runs_here(self, where: str) -> None:
        owner = "was imported from a file" if self.framework == FILE else f"belongs to a {self.framework} app"
        again = "import it again into a new folder" if self.framework == FILE else "start it again there"
        raise UserError(f"{where}: this run {owner}: {again}")

    @property
    def weighed_beside(self) -> str:
        return "" if self.framework in ("Flower", "NVFlare") else "their rule was followed elsewhere, or never"

    def check_rule(self, rule: WeighingSettings) -> None:
        """Take any rule: it was followed elsewhere."""

    def check_policy(self, rule: WeighingSettings) -> None:
        """Take any policy: what it needs was there."""

    @property
    def score_name(self) -> str:
        return self.measure


# Files, recipes and run folders.


LONGEST = 1_000_000
"""Bytes of an experiment file in a run's folder that are looked at; none of ours comes near."""
KINDS: Mapping[str, type[Description]] = {
    "learning": LearningDescription,
    "recommend": RecommendDescription,
    "recorded": RecordedDescription,
}


def kind_of(kind: object) -> type[Description]:
    """Return the class of an experiment's kind: "learning" for models of images or tables, "recommend" for FPL."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"kind: got {kind!r}{nearest(str(kind), KINDS)}; allowed: {listed(KINDS)}")
    return KINDS[kind]


def recipes() -> dict[str, Traversable]:
    """Return the ready experiments that come with the package, by name."""
    folder = resources.files("steelyard.recipes")
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


DATA: Mapping[str, tuple[str, ...]] = {
    "--csv": (".csv", ".tsv", ".csv.gz", ".xlsx", ".sav", ".dta"),
    "--parquet": (".parquet",),
    "--images": (".zip",),
}
"""How files of data end that somebody may take for an experiment, by the option of `steelyard new` that reads them."""


def source_text(name_or_file: str | Path) -> str:
    """Return the TOML text of a recipe or a file."""
    text, path = str(name_or_file), Path(name_or_file)
    ready = recipes()
    if text in ready:
        return ready[text].read_text(encoding="utf-8")
    if not _is_file(path):
        if _is_file(path / RUN_FILE):
            raise UserError(f"{path}: is the folder of a run; allowed: {path / RUN_FILE}, its experiment")
        raise UserError(
            f"experiment {brief(text)}: no such recipe or file{nearest(text, ready)}; recipes: {listed(ready)}, "
            "or the path of a TOML file"
        )
    option = next((option for option, ends in DATA.items() if path.name.lower().endswith(ends)), None)
    if option is not None:
        raise UserError(
            f"{path}: holds data and is no experiment. Write one: steelyard new my.toml {option} {shlex.quote(text)}"
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
    name_or_file: str | Path,
    changes: Sequence[str] = (),
    seed: int | None = None,
    ask: Ask | None = None,
    *,
    whole_paths: bool = True,
) -> dict[str, Any]:
    """Return a recipe or file as plain values, with changes such as "rounds.count=50" applied; nothing is checked.

    Data that lie beside a file get their whole path, unless `whole_paths` is false. So does code: that of a file from
    its folder, that of changes from the working folder. `ask` is called with the code that the file names.
    """
    document = parse(source_text(name_or_file), str(name_or_file))
    if not document:
        raise UserError(f"{name_or_file}: holds no field; allowed: an experiment, such as `steelyard new` writes")
    if str(name_or_file) not in recipes():
        beside = Path(name_or_file).resolve().parent
        resolve_code(document, beside)
        resolve_paths(document, beside, data=whole_paths)
    named = named_code(document)
    for assignment in changes:
        change(document, assignment)
    resolve_code(document, Path.cwd())
    code = {field: value for field, value in named_code(document).items() if named.get(field) == value}
    if ask is not None and code:
        ask(str(name_or_file), code)
    if seed is not None:
        document["seed"] = seed
    return document


def build(document: Mapping[str, Any], where: str = "experiment", *, reading: bool = False) -> Description:
    """Check a document and return the experiment; the first thing wrong is named in one line.

    `reading` leaves criteria unchecked that may be known only where the experiment ran.
    """
    kind = kind_of(document.get("kind", "learning"))
    if kind is RecordedDescription and not reading:
        validated(kind, document, where, READING).check_runs_here(where)
    return validated(kind, document, where, READING if reading else None)


def load(
    name_or_file: str | Path,
    changes: Sequence[str] = (),
    seed: int | None = None,
    ask: Ask | None = None,
    *,
    whole_paths: bool = True,
) -> Description:
    """Load a recipe or a TOML file with changes such as "rounds.count=50"; this is what `steelyard run` does.

    No code that it names is run; `ask` is called with it, where the experiment is about to be run. Without
    `whole_paths`, paths of data stay as they are written, for other machines to find in folders of their own.
    """
    return build(read_document(name_or_file, changes, seed, ask, whole_paths=whole_paths), str(name_or_file))


def read_experiment(folder: Path) -> Description:
    """Return the experiment that a run folder describes; none of the code that it names is run."""
    path = folder / RUN_FILE
    if not files.is_file(path):
        raise UserError(f"{folder}: {instead_of_a_run(folder, RUN_FILE)}")
    document = parse(own_text(path), str(path))
    if "name" not in document:
        # Every default is written into a run's file: without a name it was cut off, and is not the default experiment.
        raise UserError(f"{path}: is empty or cut off; allowed: the file as the run wrote it")
    resolve_code(document, folder.resolve())
    return build(document, str(path), reading=True)


def own_text(path: Path) -> str:
    """Return a text that a run or a sweep keeps in its folder; a link in its place, or a huge file, is refused."""
    try:
        return files.read_bytes(path, LONGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UserError(f"{path}: cannot be read as text: {reason}; allowed: the file as it was written") from error


def run_file(experiment: Description, folder: Path) -> str:
    """Return what a run folder's experiment file holds, once the code that it names is copied into the folder."""
    document = experiment.model_dump(mode="json", exclude_none=True)
    keep_code(document, folder / FOLDER)
    return tomli_w.dumps(document)


def to_toml(experiment: Description) -> str:
    """Write an experiment with every field resolved as TOML; reading it back gives the same experiment."""
    return tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True))


# The folder of a new run or sweep.


def new_folder(experiment: Description, out: str | Path | None) -> Path:
    """Return the folder of a new run; one that holds a run already is refused, so that nothing is lost."""
    if out is None:
        return unnamed_folder(experiment, experiment.name)
    folder = Path(out)
    if exists(folder):
        raise UserError(f"--out: {folder} holds a run already; allowed: a new folder, or `steelyard resume {folder}`")
    # What a set-up that was killed has left is replaced; with its lock the experiment's file is of the run, too. A
    # federation on one machine keeps what it needs in the folder of its run.
    left = (files.LOCK, SET_UP, FOLDER, files.UPDATES, files.FLOWER)
    return empty_folder(folder, "--out", (*left, RUN_FILE) if files.is_file(folder / files.LOCK) else left)


def unnamed_folder(experiment: Description, name: str) -> Path:
    """Return a folder that is not there yet, of this name and the time, where the experiment keeps its runs."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    first = writable(experiment.store.folder / f"{name}-{stamp}", "store.folder")
    folder, count = first, 1
    while folder.exists():
        count += 1
        folder = first.with_name(f"{first.name}-{count}")
    return folder


# Files that an experiment names: data, and code of the user's own.
#
# Reading an experiment never runs such code. A file or a run folder may come from anybody, so whoever runs what it
# names is asked first; code that Python or the command line names itself needs no asking.


def _marked(document: Mapping[str, Any], mark: type[MarkT]) -> list[tuple[str, MarkT, str, Callable[[str], None]]]:
    kind = KINDS.get(str(document.get("kind", "learning")), Description)
    return list(marked(kind, document, mark))


def resolve_paths(document: dict[str, Any], folder: Path, *, data: bool = True) -> None:
    """Replace each relative path of data that exists in `folder` by the whole path; all others stay as they are.

    Tables that are read with the settings always get their whole path; with `data` = false nothing else does.

    Use it on the document of an experiment file, before changes from the command line, whose paths are relative to the
    working folder. A whole path also lets the run be resumed from anywhere.
    """
    for _, mark, text, put in _marked(document, DataFile):
        if mark.with_settings or data:
            put(str(folder / text) if mark.with_settings else _whole(folder, text))


def _whole(folder: Path, given: str) -> str:
    """Return a relative path, or a pattern such as sites/*.csv, that exists in a folder as a whole path."""
    try:
        path = folder / given
        found = path.exists() or (any(sign in given for sign in "*?[") and glob.glob(str(path)))
        if given and found and not Path(given).is_absolute():
            return str(path.resolve())
    except (OSError, ValueError):
        pass  # A name too long for the file system, or with a NUL: the reader says so with the field's name.
    return given


FOLDER = files.CODE
"""The folder in a run's folder that holds the code it was run with."""

Ask = Callable[[str, Mapping[str, str]], None]
"""Called with a file or folder and the code it names, by field, before any of it runs; raises where it must not run."""


def named_code(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the code that an experiment names, by field; use it on a document or on a description's dump."""
    return {field: value for field, value, _ in _code_in(document)}


def resolve_code(document: dict[str, Any], base: Path) -> None:
    """Make relative paths of code absolute, in place: they are meant from the folder of the file that names them."""
    for _, value, put in _code_in(document):
        source, rest = _split(value)
        if source.endswith(".py") and not Path(source).is_absolute():
            put(f"{(base / source).resolve()}{rest}")


def rename_code(document: dict[str, Any], rename: Callable[[str], str]) -> None:
    """Name other code instead of what an experiment names, in place; a node names its own files."""
    for _, value, put in _code_in(document):
        put(rename(value))


def file_name(code: str) -> str | None:
    """Return "losses.py:mean" for code in a file or in an app folder, wherever that lies; None for other code."""
    source, rest = _split(code)
    if source.startswith(SHIPPED):
        return f"{source.removeprefix(SHIPPED)}.py{rest}"
    return f"{Path(source).name}{rest}" if source.endswith(".py") else None


def digest(path: Path) -> str:
    """Return the SHA-256 of a file of code, shortened, by which a change of it is known."""
    return hashlib.sha256(files.read_bytes(path)).hexdigest()[:16]


def content_name(code: str) -> str:
    """Return "losses.py:mean" and a digest of the file, by which the same code is known wherever it lies."""
    source, _ = _split(code)
    path = Path(_shipped(source) or source)
    name = file_name(code)
    if name is None:
        return code
    return f"{name} {digest(path) if path.is_file() else 'missing'}"


def keep_code(document: dict[str, Any], folder: Path, name_of: Callable[[str], str] | None = None) -> None:
    """Copy the files that an experiment names into a folder and name the copies instead, in place.

    By default a copy is named from above the folder, as "code/losses.py"; `name_of` makes another name of the file's.
    """
    kept: dict[str, str] = {}
    for field, value, put in _code_in(document):
        source, rest = _split(value)
        source = _shipped(source) or source
        if not source.endswith(".py"):
            continue
        if source not in kept:
            kept[source] = _copy(Path(source), folder, set(kept.values()), field)
        name = kept[source]
        put(f"{folder.name}/{name}{rest}" if name_of is None else f"{name_of(name)}{rest}")


def _shipped(source: str) -> str | None:
    """Return the file of a module that an app folder brought along; a run keeps it as it keeps any other file."""
    if not source.startswith(SHIPPED) or not app_is_loaded():  # Looking for a module imports the package around it.
        return None
    try:
        found = importlib.util.find_spec(source)
    except ModuleNotFoundError:
        return None
    return None if found is None else found.origin


def _copy(source: Path, folder: Path, taken: set[str], field: str) -> str:
    stem, number = source.stem.replace(".", "_"), 1
    name = f"{stem}.py"
    while name in taken:
        number += 1
        name = f"{stem}_{number}.py"
    with told_as(f"{field}: '{source}' cannot be copied to {folder}", "a file that can be read"):
        files.write(folder / name, source.read_bytes())
    return name


def refuse(where: str, code: Mapping[str, str], allowed: str) -> None:
    """Refuse to run the code that a file or folder names, in one line that says which and how to allow it."""
    shown = listed(f"{field} = {value}" for field, value in code.items())
    raise UserError(f"{where}: names code ({shown}), which runs with your permissions. Read it, then {allowed}")


def _code_in(document: Mapping[str, Any]) -> list[tuple[str, str, Callable[[str], None]]]:
    """Return the fields that name code: the field, what it holds, and what changes it."""
    return [(field, text, put) for field, mark, text, put in _marked(document, Code) if mark.named_by(text)]


def _split(value: str) -> tuple[str, str]:
    """Split "losses.py:mean" into the source and the rest with its colon; plugins have no rest."""
    source, colon, name = value.rpartition(":")
    return (source, colon + name) if colon else (value, "")
