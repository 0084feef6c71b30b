"""Sections of an experiment's description: their base, reading TOML, changing fields by name."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, to_jsonable_python

from steelyard.base.documents import Told, field_texts
from steelyard.base.errors import UserError, brief, listed, nearest

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


class Section(Told, metaclass=_OneLine):
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


class Kinds(Section):
    """A section of one of several kinds, told apart by one field: derive a root, and from it a class for each kind.

    `class Csv(DataSettings, named="csv")` makes a kind known; `DataSettings(source="csv", ...)`, also inside another
    section, is then a `Csv`. A field for any kind is a `SerializeAsAny[DataSettings]`, so that all its fields are
    written.
    """

    told_by: ClassVar[str]
    """The root's field that names the kind."""
    usual: ClassVar[str | None] = None
    """The kind where none is named."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Fields of some kinds that may stand beside the name of another one, which does not read them."""
    kinds: ClassVar[dict[str, type[Kinds]]]
    """The kinds of a root, by name."""
    named: ClassVar[str] = ""
    """The name of a kind; empty for a root and for what kinds have in common."""

    def __init_subclass__(cls, named: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.named = named
        if Kinds in cls.__bases__:
            cls.kinds = {}
        elif named in cls.kinds:
            raise UserError(f"{cls.told_by} {named}: registered twice; give one of them another name")
        elif named:
            cls.kinds[named] = cls

    def __new__(cls, **fields: Any) -> Self:
        """Make a section of the kind that is named."""
        return super().__new__(cls if cls.named else cast("type[Self]", cls._chosen(fields)))

    @classmethod
    def in_own_words(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return fields by their own names; override it in a root that is also written in the words of others."""
        return given

    @classmethod
    def _chosen(cls, given: Mapping[str, Any]) -> type[Kinds]:
        name = cls.in_own_words(given).get(cls.told_by) or cls.usual
        if name is None:
            raise UserError(f"{cls.told_by}: missing; allowed: {listed(cls.kinds)}")
        if not isinstance(name, str) or name not in cls.kinds:
            hint = nearest(name, cls.kinds) if isinstance(name, str) else ""
            raise UserError(f"{cls.told_by}: got {brief(name)}{hint}; allowed: {listed(cls.kinds)}")
        return cls.kinds[name]

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, given: Any, checked: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Check fields as the kind that is named asks; a field of other kinds that says nothing is left out."""
        if not isinstance(given, Mapping):
            return checked(given)
        fields = cls.in_own_words(cast("Mapping[str, Any]", given))
        if not cls.named:
            return cast("Self", cls._chosen(fields).model_validate(fields, context=info.context))
        own = {cls.told_by: cls.named}
        for name, value in fields.items():
            having = {kind: section for kind, section in cls.kinds.items() if name in section.model_fields}
            if name in cls.model_fields or not having:
                own[name] = value
            elif name in cls.unread:
                continue
            elif value is not None and not any(_is_default(section, name, value) for section in having.values()):
                raise ValueError(
                    f"{name}: got {brief(value)} with {cls.told_by} '{cls.named}'; allowed with: {listed(having)}"
                )
        return checked(own)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if cls.named:
            return handler(core)
        kinds = {name: handler(kind.__pydantic_core_schema__) for name, kind in cls.kinds.items()}
        for name, schema in kinds.items():
            for field, text in field_texts(cls.kinds[name]).items():
                schema["properties"][field]["description"] = text
            schema["properties"][cls.told_by] |= {"const": name, "default": name}
        return {"oneOf": list(kinds.values()), "discriminator": {"propertyName": cls.told_by}}


def _is_default(section: type[BaseModel], field: str, value: Any) -> bool:
    """Whether a value is the default of a field, as a file of an earlier version may hold it."""
    found = section.model_fields[field]
    if found.is_required() or not isinstance(value, str | int | float | list | tuple | dict):
        return False
    return bool(value == to_jsonable_python(found.get_default(call_default_factory=True)))


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
        if key in given:
            raise UserError(f"{option}: got '{text}'; allowed: {key} once")
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
    if get_origin(annotation) is Callable:
        return {Callable}
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


# What a validation refused, in one line: the field, what it held, what is allowed.


_ALLOWED = {
    # What pydantic calls these is no word of TOML's.
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), "a section of fields"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "a list"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("path_type", "string_type"), "text"),
    "string_unicode": "text in UTF-8",
    "callable_type": "a function",
}


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Put the first error of a validation into one line: the field, what it held, what is allowed."""
    problems = error.errors(include_url=False)
    # A field that does not exist may be why others do not fit.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    path = _path(model, first["loc"])
    name = ".".join(str(part) for part in path)
    # A field that may be of several kinds is named once for each of them.
    others = {tuple(_path(model, problem["loc"])) for problem in problems} - {tuple(path)}
    more = f" (and {len(others)} more)" if others else ""
    got = first.get("input")
    if first["type"] == "extra_forbidden":
        fields = known_fields(model, path[:-1])
        hint = _elsewhere(model, str(path[-1])) or nearest(str(path[-1]), fields)
        return f"{brief(name, '')}: unknown field{hint}; allowed here: {listed(fields) or 'none'}{more}"
    if first["type"] == "missing":
        return f"{name}: missing; this field must be given{more}"
    if first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
        return f"{name}.{text}{more}" if name else f"{text}{more}"
    hint = ""
    if first["type"] == "literal_error" and isinstance(got, str):
        hint = nearest(got, [part for part in first["msg"].split("'") if part.strip() not in ("", ",", "or")][1:])
    alike = [problem for problem in problems if _path(model, problem["loc"]) == path]
    allowed = listed(dict.fromkeys(_allowed(problem) for problem in alike))
    shown = "a table" if isinstance(got, dict) else brief(got)
    return f"{f'{name}: ' if name else ''}got {shown}{hint}; allowed: {allowed}{more}"


def _elsewhere(model: type[BaseModel], field: str) -> str:
    """Return `" (did you mean 'weighing.plugins'?)"` for a field that other sections have, or an empty string."""
    found = [f"'{name}.{field}'" for name in known_fields(model, []) if field in known_fields(model, [name])]
    return f" (did you mean {' or '.join(found)}?)" if 0 < len(found) < 4 else ""


def _path(model: type[BaseModel], location: Sequence[int | str]) -> list[int | str]:
    """Return where a problem is, without the words that pydantic adds for its own branches."""
    path: list[int | str] = []
    current: Any = model
    for part in location:
        if part == "[key]":
            break
        section = isinstance(current, type) and issubclass(current, BaseModel)
        if not section and not isinstance(part, int) and get_origin(current) not in (dict, Mapping):
            break
        path.append(part)
        current = type_below(current, part)
    return path


def _allowed(problem: Any) -> str:
    """Say what a field takes, in words of people who write experiment files."""
    kind, message = problem["type"], problem["msg"]
    context = problem.get("ctx", {})
    if kind in ("too_short", "too_long"):
        bound, word = (context["min_length"], "at least") if kind == "too_short" else (context["max_length"], "at most")
        return f"{word} {bound} value{'' if bound == 1 else 's'}"
    if kind in ("string_too_long", "string_too_short"):
        return message.removeprefix("String should have ")
    return _ALLOWED.get(kind) or str(message).removeprefix("Input should be ").removeprefix("a valid ")


def known_fields(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Return the field names of the section at a path, for the nearest match to a misspelt one."""
    current: Any = model
    for part in path:
        current = type_below(current, part)
        if current is None:
            return []
    return sorted(fields_of(current)) if isinstance(current, type) and issubclass(current, BaseModel) else []


def fields_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by name; of one of several kinds those of all its kinds."""
    kinds = section.kinds.values() if issubclass(section, Kinds) and not section.named else ()
    return {field.alias or name: field for each in (section, *kinds) for name, field in each.model_fields.items()}


def defaults_of(section: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of a section with their defaults; use it where its parameters are shown."""
    return {name: field.get_default(call_default_factory=True) for name, field in section.model_fields.items()}


def type_below(annotation: Any, part: int | str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = fields_of(annotation).get(str(part))
        return None if field is None else plain_type(field.annotation)
    inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return plain_type(inner[-1]) if inner else None


def plain_type(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        models = [argument for argument in get_args(annotation) if argument is not type(None)]
        return plain_type(models[0])
    return annotation


# Sections with other values.


def replaced(value: Any, keys: Sequence[str], new: Any, shown: str) -> Any:
    """Return a section or table with another value at a path, to be checked again: what lies off the path stays."""
    if not keys:
        return new
    key, *rest = keys
    if isinstance(value, list | tuple):
        items = list(cast("Sequence[Any]", value))
        position = _position(items, key, shown)
        return [*items[:position], replaced(items[position], rest, new, shown), *items[position + 1 :]]
    if not isinstance(value, BaseModel | Mapping | None):
        raise UserError(f"{shown}: '{key}' is in a single value, not in a section")
    table = fields_given(value) if isinstance(value, BaseModel) else dict(cast("Mapping[str, Any]", value or {}))
    inner = getattr(value, key, None) if isinstance(value, BaseModel) else table.get(key)
    return table | {key: replaced(inner, rest, new, shown)}


def fields_given(section: BaseModel) -> dict[str, Any]:
    """Return the fields of a section that were given, by name; sections inside stay sections."""
    return {name: value for name, value in section if name in section.model_fields_set}
