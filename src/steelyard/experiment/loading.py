"""Reading experiments: TOML files and recipes, changes by dotted name, and errors that name the field."""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from steelyard.errors import UserError, listed, nearest
from steelyard.experiment.sections import BaseExperiment

KINDS = ("learning", "recommend")


def kind_class(kind: str) -> type[BaseExperiment]:
    """Return the class of an experiment's kind: "learning" for models of images or tables, "recommend" for FPL."""
    if kind == "learning":
        from steelyard.experiment.model import Experiment

        return Experiment
    if kind == "recommend":
        from steelyard.recommend.experiment import RecommendExperiment

        return RecommendExperiment
    raise UserError(f"kind: got '{kind}'{nearest(kind, KINDS)}; allowed: {listed(KINDS)}")


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
    if not path.is_file():
        raise UserError(
            f"experiment '{text}': no such recipe or file{nearest(text, ready)}; recipes: {listed(ready)}, "
            "or the path of a TOML file"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from error


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; a slip in the file is named with its line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from error


def change(document: dict[str, Any], assignment: str) -> None:
    """Apply one `section.field=value` to a document; the value is read as TOML, else taken as plain text."""
    name, equals, text = assignment.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise UserError(f"--set: got '{assignment}'; allowed: section.field=value, such as rounds.count=50")
    put(document, keys, read_value(text.strip()), assignment)


def read_value(text: str) -> Any:
    """Read one value as TOML would (numbers, true, [lists], "text"); anything else is plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def put(document: dict[str, Any], keys: Sequence[str], value: Any, shown: str) -> None:
    """Set a nested value, making tables on the way."""
    table: Any = document
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(f"{shown}: '{key}' is a single value, not a section")
    table[keys[-1]] = value


def build(document: Mapping[str, Any], where: str = "experiment") -> BaseExperiment:
    """Check a document and return the experiment; the first thing wrong is named in one line."""
    kind = document.get("kind", "learning")
    chosen = kind_class(kind if isinstance(kind, str) else repr(kind))
    try:
        return chosen.model_validate(dict(document))
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, chosen)}") from None


def load(name_or_file: str | Path, changes: Sequence[str] = (), seed: int | None = None) -> BaseExperiment:
    """Load a recipe or a TOML file with changes such as "rounds.count=50"; this is what `steelyard run` does."""
    document = parse(source_text(name_or_file), str(name_or_file))
    for assignment in changes:
        change(document, assignment)
    if seed is not None:
        document["seed"] = seed
    return build(document, str(name_or_file))


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Put the first error of a validation into one line: the field, what it held, what is allowed."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = [part for part in first["loc"] if part != "function-after"]
    name = ".".join(str(part) for part in path)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message, got = first["msg"], first.get("input")
    if first["type"] == "extra_forbidden":
        fields = known_fields(model, path[:-1])
        hint = nearest(str(path[-1]), fields)
        return f"{name}: unknown field{hint}; allowed here: {listed(fields)}{more}"
    if first["type"] == "missing":
        return f"{name}: missing; this field must be given{more}"
    if first["type"] == "value_error":
        told = message.removeprefix("Value error, ")
        return f"{name}.{told}{more}" if name else f"{told}{more}"
    hint = ""
    if first["type"] == "literal_error" and isinstance(got, str):
        hint = nearest(got, [part for part in message.split("'") if part.strip() not in ("", ",", "or")][1:])
    allowed = message.removeprefix("Input should be ").removeprefix("a valid ")
    shown = "a table" if isinstance(got, dict) else repr(got)
    return f"{name}: got {shown}{hint}; allowed: {allowed}{more}"


def known_fields(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Return the field names of the section at a path, for the nearest match to a misspelt one."""
    current: Any = model
    for part in path:
        current = _step(current, part)
        if current is None:
            return []
    return sorted(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _step(annotation: Any, part: int | str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return None if field is None else _unwrap(field.annotation)
    inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return _unwrap(inner[-1]) if inner else None


def _unwrap(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        models = [argument for argument in get_args(annotation) if argument is not type(None)]
        return _unwrap(models[0])
    return annotation


def to_toml(experiment: BaseExperiment) -> str:
    """Write an experiment with every field resolved as TOML; reading it back gives the same experiment."""
    import tomli_w

    return tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True))
