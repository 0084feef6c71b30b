"""The form that starts a recipe or an experiment file: a few of its fields, as the schema of the settings has them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from steelyard.base.documents import schema_with_texts
from steelyard.base.errors import UserError
from steelyard.base.settings import parse
from steelyard.experiment.description import Description
from steelyard.experiment.loading import Ask, load, own_text, recipes
from steelyard.experiment.rules import MOST_SEEDS, load_comparison, seeds_of

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
    """Return what the page starts: the experiment files where it was started, then the recipes, each as described."""
    ready = {name: parse(entry.read_text(encoding="utf-8"), name) for name, entry in recipes().items()}
    described = {**_own(), **ready}
    return [{"name": name, "description": str(d.get("description", ""))} for name, d in described.items()]


def _own() -> dict[str, dict[str, Any]]:
    """Return the experiment files in the folder where the page was started; other TOML, such as a node's, is none."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(Path().glob("*.toml")):
        with suppress(UserError):
            document = parse(own_text(path), path.name)
            if {"data", "interactions", "rounds"} & document.keys() and "server" not in document:
                found[path.name] = document
    return found


RULES: FormField = {
    "name": "rules",
    "label": "Rules to compare",
    "value": "",
    "type": "string",
    "help": "With commas, such as fedavg,LD>DS/max; empty: the experiment's own.",
}
SEEDS: FormField = {
    "name": "seeds",
    "label": "Number of seeds",
    "value": 1,
    "type": "integer",
    "minimum": 1,
    "maximum": MOST_SEEDS,
    "help": "Several seeds compare the rules; three or more give a recommendation.",
}


def form(recipe: str) -> list[FormField]:
    """Return the fields that the form shows for an experiment, each with type, bounds, value and documentation."""
    known = [each["name"] for each in list_recipes()]
    if recipe not in known:
        raise UserError(f"recipe: got '{recipe[:100]}'; allowed: {', '.join(known)}")
    described = load(recipe)
    document = described.model_dump(mode="json")
    shown = [RULES, SEEDS]
    for name in described.form_fields:
        field, value = _lookup(_schema(type(described)), name), _value(document, name)
        if name == "weighing.priority":
            criteria = _value(document, "weighing.criteria")
            value = value or (">".join(criteria) if len(criteria) > 1 else None)
        if field is not None and (value is not None or field["type"] == "integer"):
            shown.append(cast("FormField", {"name": name, "label": LABELS[name], "value": value, **field}))
    return shown


def command(recipe: str, fields: Mapping[str, object], ask: Ask | None) -> list[str]:
    """Return the command that a filled form stands for; what cannot run is refused, code that it names is asked for."""
    changes, chosen = assignments(recipe, fields), {"rules": "", "seeds": 1, **fields}
    source = f"./{recipe}" if recipe.endswith(".toml") else recipe
    options = [source, *(part for change in changes for part in ("--set", change))]
    rules, seeds = (str(_checked(field, chosen[field["name"]])).strip() for field in (RULES, SEEDS))
    if "choquet" in rules:
        raise UserError("rules: choquet reads a file, which a form does not name; allowed: `steelyard compare`")
    if not rules and seeds == "1":
        load(source, changes, ask=ask)
        return ["run", *options]
    seeds_of(load_comparison(source, changes, [rules or "recipe"], ask=ask), int(seeds))
    return ["compare", *options, "--rules", rules or "recipe", "--seeds", seeds]


def assignments(recipe: str, fields: Mapping[str, object]) -> list[str]:
    """Return the changes of a filled form as --set takes them; a field that the form does not have is refused."""
    offered = {field["name"]: field for field in form(recipe)}
    fields = {name: value for name, value in fields.items() if name not in (RULES["name"], SEEDS["name"])}
    changes: list[str] = []
    for name, value in fields.items():
        if name not in offered:
            raise UserError(f"{name[:100]}: not a field of this form; allowed: {', '.join(offered)}")
        if value == offered[name]["value"] or value is None:
            continue
        # A JSON text or number is one of TOML too.
        changes.append(f"{name}={json.dumps(_checked(offered[name], value))}")
    return changes


def _checked(field: FormField, value: object) -> int | float | str:
    """Return a value of the type of its field."""
    name, kind = field["name"], field["type"]
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{name}: got {json.dumps(value)[:100]}; allowed: a number")
        if kind == "integer" and value != int(value):
            raise UserError(f"{name}: got {value}; allowed: a whole number")
        return int(value) if kind == "integer" else float(value)
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise UserError(f"{name}: got {json.dumps(value)[:100]}; allowed: a short text")
    return value


@lru_cache
def _schema(kind: type[Description]) -> dict[str, Any]:
    return schema_with_texts(kind)


def _value(document: Any, name: str) -> Any:
    for key in name.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _lookup(schema: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return what the form needs of a field; None for one that the schema does not have."""
    node = schema
    for key in name.split("."):
        node = _plain(schema, node).get("properties", {}).get(key)
        if node is None:
            return None
    bare = _plain(schema, node)
    bounds = {key: bare[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in bare}
    found = {"type": str(bare.get("type", "string")), "help": str(node.get("description", "")), **bounds}
    return found | ({"type": "choice", "choices": list(bare["enum"])} if "enum" in bare else {})


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
