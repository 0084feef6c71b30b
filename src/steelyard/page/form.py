"""The form that starts a recipe: a few of its fields, with types, bounds and words from the schema of the settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NotRequired, TypedDict, cast

from steelyard.base.errors import UserError
from steelyard.base.settings import parse, schema_with_texts
from steelyard.experiment.description import Description
from steelyard.experiment.loading import kind_of, read_document, recipes

LABELS = {
    "seed": "Seed",
    "rounds.count": "Rounds",
    "rounds.epochs": "Epochs",
    "rounds.fraction": "Share of clients in a round",
    "partition.clients": "Clients",
    "training.learning_rate": "Learning rate",
    "training.epochs": "Local epochs",
    "weighing.priority": "Priority",
    "weighing.normalise": "Normalise",
    "fpl.factors": "Factors",
    "fpl.learning_rate": "Learning rate",
}


class FormField(TypedDict):
    """One field of the form: its name and label, its value, type and bounds, and what its documentation says."""

    name: str
    label: str
    value: str | int | float | bool | None
    type: str
    help: str
    minimum: NotRequired[float]
    maximum: NotRequired[float]
    exclusiveMinimum: NotRequired[float]
    exclusiveMaximum: NotRequired[float]
    choices: NotRequired[list[str]]


class Recipe(TypedDict):
    """A ready experiment and what it says of itself."""

    name: str
    description: str


def list_recipes() -> list[Recipe]:
    """Return the ready experiments with what they say of themselves."""
    described = {name: parse(entry.read_text(encoding="utf-8"), name) for name, entry in recipes().items()}
    return [{"name": name, "description": str(d.get("description", ""))} for name, d in described.items()]


def form(recipe: str) -> list[FormField]:
    """Return the fields that the form shows for a recipe, each with its type, bounds, value and documentation."""
    if recipe not in recipes():
        raise UserError(f"recipe: got '{recipe[:100]}'; allowed: {', '.join(recipes())}")
    document = read_document(recipe)
    kind = kind_of(document.get("kind", "learning"))
    schema = _schema(kind)
    shown: list[FormField] = []
    for name in kind.form_fields:
        found = _lookup(schema, name)
        if found is None:
            continue
        field, default = found
        value = _value(document, name, default)
        if name == "weighing.priority":
            criteria = _value(document, "weighing.criteria", ["DS"])
            if len(criteria) < 2:
                continue
            value = value or ">".join(criteria)
        if value is None and name != "seed":
            continue
        shown.append(cast("FormField", {"name": name, "label": LABELS[name], "value": value, **field}))
    return shown


def assignments(recipe: str, fields: Mapping[str, object]) -> list[str]:
    """Return the changes of a filled form as --set takes them; a field that the form does not have is refused."""
    offered = {field["name"]: field for field in form(recipe)}
    changes: list[str] = []
    for name, value in fields.items():
        if name not in offered:
            raise UserError(f"{name[:100]}: not a field of this form; allowed: {', '.join(offered)}")
        if value == offered[name]["value"] or value is None:
            continue
        changes.append(f"{name}={_written(name, value, offered[name])}")
    return changes


def _written(name: str, value: object, field: FormField) -> str:
    kind = field["type"]
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{name}: got {json.dumps(value)[:100]}; allowed: a number")
        if kind == "integer" and value != int(value):
            raise UserError(f"{name}: got {value}; allowed: a whole number")
        return str(int(value)) if kind == "integer" else repr(float(value))
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise UserError(f"{name}: got {json.dumps(value)[:100]}; allowed: a short text")
    # A JSON text is a TOML text too.
    return json.dumps(value)


@lru_cache
def _schema(kind: type[Description]) -> dict[str, Any]:
    return schema_with_texts(kind)


def _value(document: dict[str, Any], name: str, default: Any) -> Any:
    found: Any = document
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            return default
        found = cast("dict[str, Any]", found)[key]
    return found


def _lookup(schema: dict[str, Any], name: str) -> tuple[dict[str, Any], Any] | None:
    """Return (what the form needs of a field, its default); None for a field that the schema does not have."""
    node: dict[str, Any] = schema
    default: Any = None
    for key in name.split("."):
        node = _plain(schema, node)
        properties: dict[str, Any] = node.get("properties", {})
        if key not in properties:
            return None
        outer = default.get(key) if isinstance(default, dict) else None
        node = properties[key]
        default = outer if outer is not None else node.get("default")
    described = str(node.get("description", ""))
    bare = _plain(schema, node)
    bounds = {key: bare[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in bare}
    found = {"type": str(bare.get("type", "string")), "help": described, **bounds}
    if "enum" in bare:
        found |= {"type": "choice", "choices": list(bare["enum"])}
    return found, default


def _plain(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and take the first kind that is not null where there are several; of a section, the first."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][str(node["$ref"]).rsplit("/", 1)[-1]]
        elif "oneOf" in node:
            node = node["oneOf"][0]
        elif "anyOf" in node:
            node = next(inner for inner in node["anyOf"] if inner.get("type") != "null")
        else:
            return node
