"""Sections of an experiment's description: their base, reading TOML, changing fields by name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from steelyard.errors import UserError, brief
from steelyard.explaining import explain

ModelT = TypeVar("ModelT", bound=BaseModel)

LARGEST = 10**18
"""No whole number of an experiment is larger: beyond it, arrays and databases cannot count."""
LARGEST_REAL = 1e30
"""No other number of an experiment is larger: above about 1e38 single precision has no numbers."""


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _OneLine
else:  # type checkers see what pydantic declares

    class _OneLine(type(BaseModel)):
        """Has a section that is built in Python, `WeighingSettings(...)`, name its first mistake in one line.

        Sections inside others are not built by a call, and are named by the whole that they are part of.
        """

        def __call__(cls, *positional: Any, **fields: Any) -> Any:
            if positional:
                name, given = cls.__name__, brief(positional[0])
                loads = f", or {name}.load(...) for a recipe or a file" if hasattr(cls, "load") else ""
                raise UserError(f"{name}: got {given} without the name of a field; allowed: {name}(field=value){loads}")
            try:
                return super().__call__(**fields)
            except ValidationError as error:
                raise UserError(f"{cls.__name__}: {explain(error, cls)}") from None


class Section(BaseModel, metaclass=_OneLine):
    """One table of an experiment file: frozen, every field checked, unknown fields refused.

    Derive from it in the package that the section configures; a string under a field is its documentation and
    appears in `steelyard show --schema` (`field_texts`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is asked, and numbers beyond what a computer counts."""
        if info.field_name is not None:
            try:
                _check_numbers(value, _asked(cls, info.field_name))
            except RecursionError:
                raise PydanticCustomError("plain", "values that are less deeply nested") from None
        return value


class Named(Section):
    """A thing by name whose own parameters stand beside the name; derive the settings of a registered thing from it."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Its own parameters as they were given."""
        return dict(self.model_extra or {})

    @property
    def label(self) -> str:
        """It as `--rules` writes it: "scaffold", "fedprox(mu=0.1)"."""
        given = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.name}({given})" if given else self.name


def read_named(text: str, option: str) -> dict[str, Any]:
    """Read "fedprox(mu=0.01)" as the fields of a `Named` section."""
    name, bracket, inside = text.partition("(")
    given: dict[str, Any] = {"name": name.strip()}
    for part in inside.removesuffix(")").split(",") if bracket else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not inside.endswith(")"):
            raise UserError(f"{option}: got '{text}'; allowed: {name}(parameter=value), as in fedprox(mu=0.01)")
        given[key] = read_value(value)
    return given


def _short_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise PydanticCustomError(
            "plain", "up to 100 letters, digits, '.', '_' and '-', beginning with a letter or a digit"
        )
    return value


def _printed_name(value: str) -> str:
    if not value.strip() or value != value.strip() or not value.isprintable() or "#" in value or len(value) > 200:
        raise PydanticCustomError("plain", "1 to 200 printable characters without '#' or blanks around them")
    return value


ShortName = Annotated[str, AfterValidator(_short_name)]
"""A name that may stand in the names of files and folders."""
PrintedName = Annotated[str, AfterValidator(_printed_name)]
"""A name that people read in tables."""


def _kinds(annotation: Any) -> set[Any]:
    """Return the plain types that an annotation names anywhere in it."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {type(value) for value in inner}
    if get_origin(annotation) is Annotated:
        inner = inner[:1]
    return {annotation}.union(*map(_kinds, inner)) if inner else {annotation}


@cache
def _asked(section: type[BaseModel], field: str) -> str:
    """Return what a field asks for, in the words of a refusal; nothing where it takes true and false as well."""
    kinds = _kinds(section.model_fields[field].annotation)
    if bool in kinds or Any in kinds:
        return ""
    if float in kinds or int in kinds:
        return "a number" if float in kinds else "a whole number"
    sections = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
    return "a section of fields" if sections else "text"


def _check_numbers(value: Any, instead: str) -> None:
    if isinstance(value, bool):
        if instead:
            raise PydanticCustomError("plain", instead)  # pyright: ignore[reportArgumentType]
    elif isinstance(value, int) and abs(value) > LARGEST:
        number = instead in ("", "a number", "a whole number")
        allowed = "whole numbers of at most 18 digits" if number else instead
        raise PydanticCustomError("plain", allowed)  # pyright: ignore[reportArgumentType]
    elif isinstance(value, float) and LARGEST_REAL < abs(value) < float("inf"):
        real = instead in ("", "a number")
        raise PydanticCustomError("plain", "numbers up to 1e30" if real else instead)  # pyright: ignore[reportArgumentType]
    elif isinstance(value, list | tuple):
        for inner in cast("Sequence[Any]", value):
            _check_numbers(inner, instead)


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; a slip in the file is named with its line."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from error
    except RecursionError:
        raise UserError(f"{where}: not valid TOML: nested too deeply") from None
    except ValueError:
        # Python reads no decimal number of more than 4,300 digits.
        raise UserError(f"{where}: holds a number with thousands of digits; allowed: at most 18 digits") from None


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
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise UserError(f"--set: got {brief(text)}; allowed: values that are less deeply nested") from None
    except ValueError:
        raise UserError(f"--set: got {brief(text)}; allowed: numbers of at most 18 digits") from None
    # A line break would begin another field.
    return found["value"] if len(found) == 1 else text


def put(document: dict[str, Any], keys: Sequence[str], value: Any, shown: str) -> None:
    """Set a nested value, making tables on the way; a number names one of several sections, as in flaws.0.amount."""
    table: Any = document
    for key, following in pairwise(keys):
        if isinstance(table, list):
            table = cast("list[Any]", table)[_position(cast("list[Any]", table), key, shown)]
        else:
            table = table.setdefault(key, {})
        sections = isinstance(table, list) and following.isdigit() and len(keys) > 2
        if not isinstance(table, dict) and not sections:
            raise UserError(f"{shown}: '{key}' is a single value, not a section")
    if isinstance(table, list):
        table[_position(cast("list[Any]", table), keys[-1], shown)] = value
    else:
        table[keys[-1]] = value


def _position(sections: Sequence[Any], key: str, shown: str) -> int:
    if not key.isdigit() or int(key) >= len(sections):
        raise UserError(f"{shown}: no section {key}; allowed: 0 to {len(sections) - 1}, the sections of the file")
    return int(key)


def validated(
    model: type[ModelT], document: Mapping[str, Any], where: str, context: Mapping[str, Any] | None = None
) -> ModelT:
    """Check a document against a section; the first thing wrong is named in one line that begins with `where`.

    `context` reaches the section's own checks, such as whether a run is only to be read.
    """
    try:
        return model.model_validate(dict(document), context=context)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, model)}" if where else explain(error, model)) from None
