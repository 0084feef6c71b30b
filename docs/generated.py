"""Reference pages made from the code when the site is built: every field, every command, criteria and models.

`build.py` adds them to those that are written by hand. Nothing is kept in the repository, so nothing can be stale.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fields import cell, fields_page, table
from typer.core import TyperCommand

from steelyard.base.documents import Document


def pages() -> dict[str, str]:
    """Return all generated pages by path; tests read them without building the site."""
    return {
        "reference/fields.md": fields_page(),
        "reference/cli.md": commands_page(),
        "reference/models.md": models_page(),
        "reference/recipes.md": recipes_page(),
        "reference/database.md": database_page(),
        "reference/check.md": check_page(),
        "reference/model-json.md": model_page(),
        **policy_pages(),
    }


def root_pages() -> dict[str, str]:
    """Return the repository's own pages that the site shows too, with their links seen from the site."""
    root = Path(__file__).parents[1]
    return {
        f"{name.lower()}.md": (root / f"{name}.md").read_text(encoding="utf-8").replace("](docs/", "](")
        for name in ("CONTRIBUTING", "CHANGELOG")
    }


# Commands -------------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command with its arguments and options, from the command line itself."""
    from steelyard.cli.main import command_line

    root = command_line()
    lines = [
        "# Commands",
        "",
        "Made from the code; `steelyard COMMAND --help` says the same. [Exit codes](exit-codes.md) hold for all.",
        "",
        "## Options of every command",
        "",
        "They may stand before the command's name or after it. Answers go to standard output, messages to standard "
        "error; the same warning is shown once.",
        "",
        *_parameters([], [option for option in root.params if option.name not in ("version", "help")]),
        "",
        "`STEELYARD_LOG_LEVEL` (`debug`, `info`, `warning`) and `STEELYARD_LOG_FILE` say the same to processes that "
        "others start, such as Flower's. In Python messages go to the standard `logging`, below the name `steelyard`.",
    ]
    for path, command in _commands(root, "steelyard"):
        lines += ["", f"## `{path}`", "", *_command(path, command)]
    return "\n".join(lines) + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, TyperCommand]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from _commands(child, f"{path} {name}")


def _command(path: str, command: TyperCommand) -> list[str]:
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option" and param.name != "help"]
    shown = " ".join(_argument(argument) for argument in arguments)
    lines = ["```text", f"{path} {shown}".rstrip() + (" [OPTIONS]" if options else ""), "```", ""]
    return [*lines, " ".join((command.help or "").split()), "", *_parameters(arguments, options)]


def _parameters(arguments: Sequence[Any], options: Sequence[Any]) -> list[str]:
    lines = ["| | what |", "|---|---|"] if arguments or options else []
    lines += [f"| `{_argument(argument)}` | {cell(_what(argument))} |" for argument in arguments]
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        lines.append(f"| {cell(names)} | {cell(_what(option))} |")
    return lines


def _what(parameter: Any) -> str:
    what = " ".join(str(getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if isinstance(default, bool) or not isinstance(default, str | int | float) or "default" in what.lower():
        return what
    return f"{what} Default: `{default}`."


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name or "").strip("[]").upper()
    many = "..." if parameter.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if parameter.required else f"[{name}{many}]"


# Criteria, models, recipes --------------------------------------------------------------------------------------------


def rules_page() -> str:
    """Describe every word of a rule and every criterion; a test holds docs/reference/rules.md to it."""
    from steelyard.algorithms import catalogue
    from steelyard.experiment.rules import rule_words
    from steelyard.weighing import criterion

    for registry in (catalogue, criterion):
        registry.load_plugins([])  # without what a test of the same process loaded
    kinds = {"order": "Order", "rule": "Operators", "policy": "Published weighting methods", "algorithm": "Algorithms"}
    lines = [
        *("# Rule syntax", ""),
        "A rule says what clients are weighted by. `--rules` of `compare`, `--by` of `weigh` and the fields of",
        "`[weighing]` take the same rules. `steelyard explain RULE` prints a rule in words, its formula, who measures",
        "what and, where criteria alone decide, an example with three clients:",
        *("", "```sh", 'steelyard explain "VP>LD>DS/max"', "```", ""),
        "`>` puts one criterion before another, and `/max` divides each criterion by its largest value in the round.",
        "Neither is arithmetic. `VP>LD>DS/max` reads: accuracy on the server's validation set first, then number of",
        "distinct labels, then number of training samples. Its score is VP + VP·LD + VP·LD·DS, so a criterion counts",
        "only as far as those before it are met.",
        *("", "Made from the code: `python -m tests.docs.test_result` writes this page again.", ""),
        *("## Criteria", "", "Formulas stand in [Weighing clients](weighing.md).", ""),
        *("| name | what | about the | measured by the |", "|---|---|---|---|"),
        *(
            f"| `{each.name}` | {cell(each.description)} | {each.about} | {each.measured_by} |"
            for each in (*criterion.known().values(), criterion.get("fact(NAME)"))
            if each.built_in
        ),
    ]
    for kind, heading in kinds.items():
        rows = [(f"`{word}`", cell(what)) for word, found, what in rule_words() if found == kind]
        lines += [
            "",
            f"## {heading}",
            "",
            *("| word | what it does |", "|---|---|"),
            *(f"| {a} | {b} |" for a, b in rows),
        ]
    return "\n".join(lines) + "\n"


def policy_pages() -> dict[str, str]:
    """A page for each policy: its equation and where it comes from, what it assumes, its parameters, figures."""
    from steelyard.weighing.policy import known

    figures = tomllib.loads((Path(__file__).parent / "policies.toml").read_text(encoding="utf-8"))
    return {
        f"algorithms/policies/{name}.md": _policy_page(made, figures.get(name, {})) for name, made in known().items()
    }


def _policy_page(made: Any, figures: Mapping[str, Any]) -> str:
    from steelyard.weighing import criterion as criteria
    from steelyard.weighing.policy import described

    found = described(made)
    title, _, rest = (sys.modules[made.__module__].__doc__ or "").strip().partition("\n")
    *body, link = rest.strip("\n").splitlines()
    measures = [f"- `{name}`: {criteria.get(name).description}" for name in found["criteria"]]
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
        f"**{when[:1].upper()}{when[1:]}.** {what}. {sums} The weights are made from",
        "",
        *measures,
        "",
        f"**It assumes** {', '.join(found['needs'])}." if found["needs"] else "**It assumes** nothing else.",
        "",
        *table(made),
        "",
        f"**Published.** {figures.get('published', 'No figure of its authors is quoted here: see the paper.')}",
        "",
        *_ours(found["name"], figures.get("ours", [])),
        f"Source: <{link.split()[0]}>. Code: `{made.__module__.replace('.', '/')}.py`; the authors' numbers: "
        "`tests/weighing/policies/test_authors.py`.",
    ]
    return "\n".join(lines) + "\n"


def _ours(name: str, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["**Ours.** [Malicious clients](../../results/attacks.md).", ""]
    return [
        "**Ours.** Digits, 20 rounds, 5 seeds: accuracy (%) on rows of the server. "
        "[Published weighting methods](../policies.md#our-measurements) has it beside all others.",
        "",
        f"| clients | {name} | FedAvg | equal weights |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def models_page() -> str:
    """The networks that come with the package: what each is for, how large it is, the fields that change it."""
    from steelyard.learning.settings import BUILT_IN

    lines = [
        "# Networks",
        "",
        "Made from the code; `steelyard list models` shows the same. Your own: [Use your own code](own-code.md).",
        "",
        "| `model.name` | for | parameters | fields |",
        "|---|---|---|---|",
    ]
    for model in BUILT_IN:
        shape = "×".join(map(str, model.shape))
        size = f"{model.parameters:,} for samples of {shape} and {model.outputs} outputs"
        fields = ", ".join(f"`{field}`" for field in model.fields)
        lines.append(f"| `{model.name}` | {cell(model.purpose)} | {size} | {fields} |")
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    """The ready experiments: their own words, and how to see them."""
    import tomllib

    from steelyard.experiment.loading import recipes

    lines = [
        "# Recipes",
        "",
        "Made from the code; `steelyard list recipes` shows them, `steelyard show NAME` prints one.",
        "",
        "| recipe | what |",
        "|---|---|",
    ]
    for name, entry in recipes().items():
        document = tomllib.loads(entry.read_text(encoding="utf-8"))
        lines.append(f"| `{name}` | {cell(str(document.get('description', '')))} |")
    return "\n".join(lines) + "\n"


def database_page() -> str:
    """The tables of a run's database: the statements that make them, each with what its columns hold."""
    from steelyard.runs.schema import SCHEMA, VERSION

    lines = [
        "# Tables of a run",
        "",
        f"Made from the code: `run.sqlite` of a [run's folder](files.md), schema {VERSION}. A round is written in one "
        "transaction. In Python [`History`](api.md) reads them, as data frames and arrays.",
        "",
        "A federation is a rule with an algorithm and a seed. Columns of type BLOB hold the numbers of all clients of "
        "a round, little-endian, in the order of the column `clients`. NULL is what nobody knows.",
    ]
    for statement in re.findall(r"^CREATE TABLE .*?;$", SCHEMA, re.DOTALL | re.MULTILINE):
        made = statement.replace("IF NOT EXISTS ", "")
        lines += ["", f"## `{made.split()[2]}`", "", "```sql", made, "```"]
    return "\n".join(lines) + "\n"


# The result of a run -------------------------------------------------------------------------------------------------


def result_page() -> str:
    """Describe the JSON of `run`, `compare` and `table`; a test holds docs/reference/result.md to it."""
    from steelyard.report.result import Comparison

    lines = [
        "# The result of a run as JSON",
        "",
        "`run`, `resume`, `compare` and `table` print this document with `--format json`. `Result.comparison` in",
        "Python is the same as an object: `result.comparison.rules[0].figures`. A number that is not known is null.",
        "",
        "Made from the code: `python -m tests.docs.test_result` writes this page again.",
    ]
    return _document_page(Comparison, lines)


def check_page() -> str:
    """Describe what `check` finds, and its JSON."""
    from steelyard.data.findings import NAMES
    from steelyard.experiment.data_check import DataCheck

    lines = [
        "# What check finds",
        "",
        "`steelyard check FILE` prints findings in order of harm. `new` and `run` look for the same. An error stops",
        "`run` and `compare` unless `--accept NAME` names it; a warning never does. The exit code is 1 where an error",
        "is left, else 0; 2 where there is no such experiment.",
        "",
        "| name | level | what |",
        "|---|---|---|",
        *(f"| `{name}` | {level} | {meaning} |" for name, (level, meaning) in NAMES.items()),
        "",
        "With `--format json` it prints this document; `steelyard.check` in Python returns it as an object.",
    ]
    return _document_page(DataCheck, lines)


def model_page() -> str:
    """Describe the JSON of `model`, `predict` and `test`."""
    from steelyard.models.document import ModelDocument, Tested
    from steelyard.models.predicting import Predicted

    page = "\n".join(
        [
            "# Models as JSON",
            "",
            "With `--format json` `steelyard model` prints what stands in `model.json`, a `ModelDocument`; `predict`",
            "prints a `Predicted`, `test` and `recommend test` a `Tested`. The exit code is 0 where that is done; 2",
            "where something that was given is wrong; `model` ends with 1 where the run was changed, and writes",
            "nothing then.",
        ]
    )
    for document in (ModelDocument, Predicted, Tested):
        page = _document_page(document, [page])
    return page


def _document_page(document: type[Document], lines: list[str]) -> str:
    """Return a page with every key of a document and its schema, below what it begins with."""
    schema = document.schema_of_output()
    for name, part in {document.__name__: schema, **schema.get("$defs", {})}.items():
        said = " ".join(part.get("description", "").split())
        if "properties" not in part:
            values = ", ".join(f"`{value}`" for value in part["enum"])
            lines += ["", f"## {name}", "", f"{said} One of {values}."]
            continue
        lines += ["", f"## {name}", "", said, "", "| key | type | what |", "|---|---|---|"]
        for key, field in part["properties"].items():
            lines.append(f"| `{key}` | {_json_type(field)} | {' '.join(field.get('description', '').split())} |")
    text = json.dumps(schema, indent=1, ensure_ascii=False)
    return "\n".join([*lines, "", "## JSON schema", "", "```json", text, "```", ""])


def _json_type(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words, with links to the tables of others."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_json_type(each) for each in field["anyOf"])
    if "enum" in field:
        return " or ".join(f'"{value}"' for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_json_type(field['items'])}"
    if field.get("type") == "object":
        held = field["additionalProperties"]
        return "by name: anything" if held is True else f"by name: {_json_type(held)}"
    kind = field["type"]
    return " or ".join(kind) if isinstance(kind, list) else kind
