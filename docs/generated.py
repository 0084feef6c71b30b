"""Reference pages made from the code when the site is built: every field, every command, criteria and models.

A hook of mkdocs: `mkdocs build` calls `on_files`. Nothing it makes is kept in the repository, so nothing can be stale.
"""

from __future__ import annotations

import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import typer.main
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those that are written by hand; mkdocs calls it on every build."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Return all generated pages by path; tests read them without building the site."""
    return {
        "reference/fields.md": fields_page(),
        "reference/cli.md": commands_page(),
        "reference/criteria.md": criteria_page(),
        "reference/models.md": models_page(),
        "reference/recipes.md": recipes_page(),
        **policy_pages(),
    }


# Fields ---------------------------------------------------------------------------------------------------------------


def fields_page() -> str:
    """Every field of an experiment file, by kind and section, from the sections' own classes."""
    from steelyard.experiment.loading import kind_of

    lines = [
        "# Fields of an experiment file",
        "",
        "Made from the code. `steelyard show --schema` prints the same as JSON; `steelyard show NAME --resolved` "
        "shows a recipe with every default filled in; `--set section.field=value` changes any of them.",
    ]
    seen: set[str] = set()
    for kind in ("learning", "recommend"):
        description = kind_of(kind)
        lines += ["", f'## kind = "{kind}"', "", _first_sentence(description)]
        for name, section in _sections(description):
            key = f"{name}:{section.__name__}"
            if key in seen:
                continue
            seen.add(key)
            lines += ["", f"### {name} {{: #{_anchor(kind, name)} }}", "", _paragraph(section), "", *_table(section)]
    return "\n".join(lines) + "\n"


def _anchor(kind: str, name: str) -> str:
    return f"{kind}-" + "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")


def _sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield (f"`[{path}]`" if path else "top of the file", model)
    for name, field in model.model_fields.items():
        inner, several = _section_of(field.annotation)
        if inner is None:
            continue
        below = f"{path}.{name}" if path else name
        if name == "beside":
            continue  # each has the fields of [weighing]; the field's own text says so
        if several:
            yield f"`[[{below}]]`", inner
        else:
            yield from _sections(inner, below)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    several = get_origin(annotation) in (tuple, list, dict)
    for argument in get_args(annotation):
        inner, deeper = _section_of(argument)
        if inner is not None:
            return inner, several or deeper
    return None, False


def _table(section: type[BaseModel]) -> list[str]:
    rows = ["| field | allowed | default | what |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if _section_of(field.annotation)[0] is not None and name != "beside":
            continue
        what = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {_cell(_allowed(field))} | {_cell(_default(field))} | {_cell(what)} |")
    return rows if len(rows) > 2 else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        return f"`{list(value)}`".replace("'", '"')
    if isinstance(value, Mapping):
        return "`{}`" if not value else f"`{dict(value)}`"
    return f"`{value}`"


_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    dict: "table",
    tuple: "list",
    list: "list",
}


def _allowed(field: FieldInfo) -> str:
    return _bounded(_kind(field.annotation), field.metadata)


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_kind(arguments[0]), annotation.__metadata__)
    if origin is Literal:
        return ", ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(argument) for argument in arguments if argument is not type(None)))
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}" if arguments else "list"
    if origin is dict:
        return f"table: {_kind(arguments[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = getattr(annotation, "__name__", "")
    return _WORDS.get(annotation, "path" if name == "Path" else name.lower() or "value")


def _bounded(kind: str, constraints: Any) -> str:
    bounds: list[str] = []
    for constraint in constraints:
        for part in getattr(constraint, "metadata", None) or [constraint]:
            bounds += [
                f"{sign} {_number(getattr(part, name))}"
                for limit, name, sign in (
                    (Ge, "ge", "≥"),
                    (Gt, "gt", ">"),
                    (Le, "le", "≤"),
                    (Lt, "lt", "<"),
                    (MinLen, "min_length", "length ≥"),
                    (MaxLen, "max_length", "length ≤"),
                )
                if isinstance(part, limit)
            ]
    return ", ".join([kind, *bounds])


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"


# Commands -------------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command with its arguments and options, from the command line itself."""
    from steelyard.cli.main import app

    lines = [
        "# Commands",
        "",
        "Made from the code; `steelyard COMMAND --help` says the same. [Exit codes](exit-codes.md) hold for all.",
    ]
    root = typer.main.get_command(app)
    for path, command in _commands(root, "steelyard"):
        lines += ["", f"## `{path}`", "", *_command(path, command)]
    return "\n".join(lines) + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, click.Command]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from _commands(child, f"{path} {name}")


def _command(path: str, command: click.Command) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument" and not getattr(p, "hidden", False)]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    shown = " ".join(_argument(argument) for argument in arguments)
    lines = ["```text", f"{path} {shown}".rstrip() + (" [OPTIONS]" if options else ""), "```", ""]
    lines += [" ".join((command.help or "").split()), ""]
    if arguments or options:
        lines += ["| | default | what |", "|---|---|---|"]
    for parameter in (*arguments, *options):
        names = (
            ", ".join(f"`{name}`" for name in parameter.opts) if parameter in options else f"`{_argument(parameter)}`"
        )
        default = parameter.default
        shown_default = (
            f"`{default}`" if isinstance(default, str | int | float) and not isinstance(default, bool) else ""
        )
        what = " ".join(str(getattr(parameter, "help", None) or "").split())
        lines.append(f"| {_cell(names)} | {_cell(shown_default)} | {_cell(what)} |")
    return lines


def _argument(parameter: click.Parameter) -> str:
    name = (parameter.metavar or parameter.name or "").upper()
    many = "..." if parameter.nargs == -1 else ""
    return f"{name}{many}" if parameter.required else f"[{name}{many}]"


# Criteria, models, recipes --------------------------------------------------------------------------------------------


def criteria_page() -> str:
    """Every built-in criterion: what it is, who measures it, what it needs."""
    from steelyard.weighing import criteria

    lines = [
        "# Criteria",
        "",
        "Made from the code; `steelyard criteria` lists the same, and those of your packages. The formulas stand in "
        "[Weighing clients](weighing.md).",
        "",
        "| name | what | about | measured by |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{criterion.name}` | {_cell(criterion.description)} | {criterion.about} | the {criterion.measured_by} |"
        for criterion in criteria.known().values()
    ]
    return "\n".join(lines) + "\n"


def policy_pages() -> dict[str, str]:
    """A page for each policy: its equation and where it comes from, what it assumes, its parameters, figures."""
    from steelyard.weighing.policies.catalogue import known

    figures = tomllib.loads((Path(__file__).parent / "policies.toml").read_text(encoding="utf-8"))
    return {
        f"algorithms/policies/{name}.md": _policy_page(made, figures.get(name, {})) for name, made in known().items()
    }


def _policy_page(made: Any, figures: Mapping[str, str]) -> str:
    from steelyard.weighing import criteria
    from steelyard.weighing.policies.describing import described

    found = described(made)
    title, _, rest = (sys.modules[made.__module__].__doc__ or "").strip().partition("\n")
    *body, link = rest.strip("\n").splitlines()
    measures = [f"`{name}` ({criteria.get(name).description})" for name in found["criteria"]]
    sums = {
        "shares": "They sum to 1.",
        "updates": "They need not sum to 1: the step is Θ + Σ wᵢ(θᵢ − Θ).",
        "models": "They need not sum to 1: the model is Σ wᵢθᵢ.",
    }[found["applies_to"]]
    what, _, when = found["description"].partition("; ")
    lines = [
        f"# {found['name']}",
        "",
        title,
        "",
        *body,
        "",
        f"**{when[:1].upper()}{when[1:]}.** {what}. The weights are made from {', '.join(measures)}. {sums}",
        "",
        f"**It assumes** {', '.join(found['needs'])}." if found["needs"] else "**It assumes** nothing else.",
        "",
        *_table(made),
        "",
        f"**Published.** {figures.get('published', 'No figure of its authors is quoted here: see the paper.')}",
        "",
        f"**Ours.** {figures['ours']} [Weights by others](../policies.md#ours) has it beside all others.",
        "",
        f"Source: <{link.split()[0]}>. Code: `{made.__module__.replace('.', '/')}.py`; the authors' numbers: "
        "`tests/weighing/policies/test_authors.py`.",
    ]
    return "\n".join(lines) + "\n"


def models_page() -> str:
    """The networks that come with the package: what each is for, how large it is, the fields that change it."""
    from steelyard.learning.catalogue import BUILT_IN

    lines = [
        "# Networks",
        "",
        "Made from the code; `steelyard models` lists the same. Your own: [Use your own code](own-code.md).",
        "",
        "| `model.name` | for | parameters | fields |",
        "|---|---|---|---|",
    ]
    for model in BUILT_IN:
        shape = "×".join(map(str, model.shape))
        size = f"{model.parameters:,} for samples of {shape} and {model.outputs} outputs"
        fields = ", ".join(f"`{field}`" for field in model.fields)
        lines.append(f"| `{model.name}` | {_cell(model.purpose)} | {size} | {fields} |")
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    """The ready experiments: their own words, and how to see them."""
    import tomllib

    from steelyard.experiment.loading import recipes

    lines = [
        "# Recipes",
        "",
        "Made from the code; `steelyard recipes` lists them, `steelyard show NAME` prints one.",
        "",
        "| recipe | what |",
        "|---|---|",
    ]
    for name, entry in recipes().items():
        document = tomllib.loads(entry.read_text(encoding="utf-8"))
        lines.append(f"| `{name}` | {_cell(str(document.get('description', '')))} |")
    return "\n".join(lines) + "\n"


def _first_sentence(described: type) -> str:
    return " ".join((described.__doc__ or "").strip().split("\n\n")[0].split())


def _paragraph(described: type) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (described.__doc__ or "").strip().split("\n\n"))
