"""The commands that list and print: recipes, show, criteria, algorithms, policies, models, export, docs.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
import textwrap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steelyard import manual
from steelyard.algorithms import catalogue
from steelyard.base.errors import UserError, brief, printable
from steelyard.base.settings import parse, schema_with_texts
from steelyard.cli.options import FormatOption, SeedOption, SetOption, recipe_names
from steelyard.cli.printing import print_entries, print_json, print_wrapped, terminal_width
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import kind_of, load, source_text, to_toml
from steelyard.experiment.loading import recipes as ready
from steelyard.learning.settings import BUILT_IN
from steelyard.runs.history import History
from steelyard.weighing import criterion, policy
from steelyard.weighing.rule import WeighingSettings, trust_of

if TYPE_CHECKING:
    from steelyard.data.inspect import Form
    from steelyard.experiment.description import Description


def recipes(format: FormatOption = "text") -> None:
    """List the ready experiments."""
    described = {name: parse(entry.read_text(encoding="utf-8"), name) for name, entry in ready().items()}
    if format == "json":
        print_json([{"name": name, "description": d.get("description", "")} for name, d in described.items()])
        return
    print_entries({name: str(document.get("description", "")) for name, document in described.items()})


def show(
    experiment: Annotated[
        str | None, typer.Argument(help="Name of a recipe, or path of a TOML file.", autocompletion=recipe_names)
    ] = None,
    changes: SetOption = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of an experiment file.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="With every default filled in.")] = False,
    split: Annotated[bool, typer.Option("--split", help="Draw how its rows are shared out over the clients.")] = False,
    seed: SeedOption = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="With --split: also write it as a .svg, .png or .pdf file.")
    ] = None,
    format: FormatOption = "text",
) -> None:
    """Print an experiment as TOML, the schema of experiment files, or a drawing of an experiment's split."""
    if not split and (figure is not None or format == "json"):
        raise UserError(f"show: got {'--figure' if figure else '--format json'}; allowed with: --split")
    if split and experiment is not None:
        _draw_split(load(experiment, changes or [], seed), figure, format)
        return

    if schema:
        print_json(schema_with_texts(kind_of("learning") if experiment is None else type(load(experiment))))
        return
    if experiment is None:
        raise UserError("show: no experiment named; allowed: a recipe, a file, or --schema")
    described = load(experiment, changes or [])
    if resolved and described.all_clients is not None:
        described = described.for_clients(described.all_clients)
    print(to_toml(described) if changes or resolved else source_text(experiment), end="")


def _draw_split(described: Description, figure: Path | None, format: str) -> None:
    """Read the data of an experiment, share them out and draw that; nothing is trained."""
    from steelyard.data.partition import share_out
    from steelyard.data.scaling import load as load_data
    from steelyard.report.split import account, draw_letters, split_of

    if not isinstance(described, LearningDescription):
        raise UserError(
            "show: got --split with a recommender, each of whose users is one client; allowed: experiments that share "
            "rows out by [partition]"
        )
    shared = share_out(load_data(described.data), described.partition, described.seed, described.flaws)
    found = split_of(shared)
    if figure is not None:
        from steelyard.report.figures import write_figure
        from steelyard.report.figures.one_rule import planned_split

        write_figure(planned_split(found), figure)
    if format == "json":
        print_json(found)
        return
    for line in draw_letters(found, terminal_width() or 80):
        print(printable(line))
    for line in account(found):
        print_wrapped(line)


def criteria(
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Python file or module with criteria.")] = None,
    format: FormatOption = "text",
) -> None:
    """List the criteria: what each measures, who takes the measure, what it is about, how far it can be trusted."""
    criterion.load_plugins(plugin or [])
    plain = WeighingSettings()
    found = [
        {
            "name": c.name,
            "measured_by": c.measured_by,
            "about": c.about,
            "trust": trust_of(c, plain),
            "description": c.description,
        }
        for c in criterion.known().values()
    ]
    if format == "json":
        print_json(found)
        return
    print_entries(
        {
            e["name"]: f"{e['description']} (about the {e['about']}, measured by the {e['measured_by']}, {e['trust']})"
            for e in found
        }
    )


def algorithms(
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Python file or module with algorithms.")] = None,
    format: FormatOption = "text",
) -> None:
    """List the algorithms: what each changes at the client or the server, and its parameters with their defaults."""
    catalogue.load_plugins(plugin or [])
    table = catalogue.known()
    about = {name: (made.__doc__ or "").split("\n")[0].rstrip(".") for name, made in table.items()}
    given = {name: {key: field.default for key, field in made.model_fields.items()} for name, made in table.items()}
    if format == "json":
        print_json(
            [
                {
                    "name": name,
                    "description": about[name],
                    "parameters": given[name],
                    "keeps": list(made.keeps),
                    "sends": list(made.sends),
                }
                for name, made in table.items()
            ]
        )
        return
    shown = {name: ", ".join(f"{key} = {value}" for key, value in fields.items()) for name, fields in given.items()}
    print_entries({name: f"{about[name]} ({shown[name] or 'no parameters'})" for name in table})


def policies(format: FormatOption = "text") -> None:
    """List the policies, weights by others: what each weighs by, what it needs, and its parameters with defaults."""
    found = [policy.described(made) for made in policy.known().values()]
    if format == "json":
        print_json(found)
        return
    entries: dict[str, str] = {}
    for each in found:
        shown = ", ".join(f"{key} = {value}" for key, value in each["parameters"].items()) or "no parameters"
        needs = f"needs {', '.join(each['needs'])}" if each["needs"] else "needs nothing else"
        entries[each["name"]] = f"{each['description']} ({needs}; {shown})"
    print_entries(entries)


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Literal["csv", "json", "parquet"], typer.Option("--to", help="Format of the tables.")] = "csv",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the files; default: DIR/export.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files of an earlier export.")] = False,
) -> None:
    """Write a run's rounds, clients and evaluations as files."""
    from steelyard.runs.export import export_run

    for path in export_run(History(folder), to, out, force=force):
        print(printable(str(path)))


def models(format: FormatOption = "text") -> None:
    """List the built-in networks: what each is for, how large it is, and the fields that change it."""
    if format == "json":
        print_json(
            [
                {
                    "name": model.name,
                    "purpose": model.purpose,
                    "typical_shape": list(model.shape),
                    "typical_outputs": model.outputs,
                    "parameters": model.parameters,
                    "fields": list(model.fields),
                }
                for model in BUILT_IN
            ]
        )
        return
    width = max(len(model.name) for model in BUILT_IN)
    for model in BUILT_IN:
        shape = "×".join(map(str, model.shape)) if len(model.shape) > 1 else f"{prod(model.shape)} columns"
        _print(f"{model.name:<{width}}  {model.purpose}", width + 2)
        _print(
            f"{'':<{width}}  {model.parameters:,} parameters for samples of {shape} and {model.outputs} "
            f"output{'s' if model.outputs > 1 else ''}; fields: {', '.join(model.fields)}",
            width + 2,
        )
    print()
    _print('In an experiment: [model] name = "mlp". Your own torch.nn.Module: name = "file.py:factory".', 0)


def _print(line: str, indent: int) -> None:
    """Print a line; in a terminal it is broken so that it stays beside the model's name."""
    columns = terminal_width()
    print(line if columns is None else textwrap.fill(line, columns, subsequent_indent=" " * indent))


def docs(
    words: Annotated[
        list[str] | None, typer.Argument(help="Look for these words, and open the page that fits best.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the pages into this folder; default: the cache.")
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Open the guide and the reference in the browser, from the installed package: no network is needed."""
    import webbrowser

    page = "index"
    if words:
        found = manual.search(" ".join(words))
        if not found:
            raise UserError(f"docs: no page holds '{' '.join(words)}'; allowed: other words, or none to see all pages")
        for _, path, title in found[:10]:
            print(f"{path}: {title}")
        page = found[0][1]
    address = (manual.write_pages(out) / f"{page}.html").resolve().as_uri()
    print(address)
    if show:
        webbrowser.open(address)


# `steelyard new`.


def new(
    file: Annotated[Path, typer.Argument(help="The experiment file to write, such as my.toml.")],
    more: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    csv: Annotated[
        list[Path] | None,
        typer.Option(
            "--csv", help="A table with names of columns, also .xlsx, .sav, .dta; a folder or several: one client each."
        ),
    ] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="A table as a .parquet file.")] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="A folder or .zip of images, in a folder for each class.")
    ] = None,
    label: Annotated[str | None, typer.Option("--label", help="The column to predict.")] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="The column that says whose row it is; images: folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there already.")] = False,
) -> None:
    """Look at your data and write an experiment for them, with comments, that runs as it is."""
    # A shell that writes out sites/*.csv leaves all but the first beside the option.
    tables = [*(csv or []), *(more or [])]
    if more and not csv:
        raise UserError(f"new: got {brief(str(more[0]))} beside the file to write; allowed: one file to write")
    single: dict[Form, Path | None] = {"parquet": parquet, "images": images}
    named: list[tuple[Form, list[Path]]] = [(form, [path]) for form, path in single.items() if path is not None]
    if tables:
        named.append(("csv", tables))
    if not named and file.exists() and file.suffix != ".toml":
        raise UserError(f"new: '{file}' is the file to write; allowed: `steelyard new my.toml --csv {file}`")
    if len(named) != 1:
        raise UserError(f"new: got {len(named)} sources of data; allowed: one of --csv, --{', --'.join(single)}")
    form, paths = named[0]
    if any(file.exists() and path.exists() and file.samefile(path) for path in paths):
        raise UserError(f"new: '{file}' is the data itself; allowed: another name, such as my.toml")
    # For speed of start: --help must not wait for torch.
    from steelyard.data.inspect import look
    from steelyard.experiment.proposing import check_target, propose, write

    check_target(file, force=force)
    data = look(form, paths, label, owner)
    text, summary = propose(data, paths, file)
    write(file, text, force=force)
    for line in data.account:
        print(line)
    for line in data.hints:
        print(f"hint: {line}")
    print(f"wrote {file}: {summary}")
    print(f"next: steelyard run {shlex.quote(str(file))}")
