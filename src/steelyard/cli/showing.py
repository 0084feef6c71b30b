"""The commands that list, print and write: list, show, export, docs, new.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from steelyard import manual
from steelyard.algorithms import catalogue
from steelyard.base.documents import first_line, schema_with_texts
from steelyard.base.errors import UserError, brief, counted, listed, printable
from steelyard.base.settings import Section, defaults_of, parse
from steelyard.cli.options import (
    AcceptOption,
    ExperimentArgument,
    Format,
    FormatOption,
    SeedOption,
    SetOption,
    TrustOption,
    asking,
    recipe_names,
)
from steelyard.cli.printing import emit, terminal_width
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import kind_of, load, source_text, to_toml
from steelyard.experiment.loading import recipes as ready
from steelyard.experiment.rules import parse_rules, rule_words
from steelyard.learning.settings import BUILT_IN
from steelyard.report.rendering import Block, Copied, Table, account, draw_letters, split_of
from steelyard.runs.history import History
from steelyard.weighing import criterion, policy
from steelyard.weighing.reading import example, formula, reading
from steelyard.weighing.rule import WeighingSettings, trust_of

if TYPE_CHECKING:
    from steelyard.data.inspect import Form
    from steelyard.experiment.description import Description


class Listing(NamedTuple):
    """What `steelyard list` shows of one kind: a document for programs, and a table."""

    document: object
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def list_names(
    what: Annotated[
        Literal["rules", "criteria", "algorithms", "policies", "attacks", "models", "recipes"] | None,
        typer.Argument(help="What to list; without it, what there is to list."),
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="Python file or module with criteria, or with algorithms.")
    ] = None,
    format: FormatOption = "text",
) -> None:
    """List the words of rules, criteria, algorithms, published weighting methods, attacks, networks or recipes."""
    loads = {"criteria": criterion.load_plugins, "algorithms": catalogue.load_plugins}
    if plugin and what not in loads:
        raise UserError(f"--plugin: got it with {what or 'nothing to list'}; allowed with: {listed(loads)}")
    if what in loads:
        loads[what](plugin or [])
    if what is None:
        rows = [(name, about) for name, (about, _) in LISTINGS.items()]
        found = Listing(dict(rows), ("WHAT", "what there is"), rows)
    else:
        found = LISTINGS[what][1]()
    emit(found.document, format, [Table("", found.headings, tuple(found.rows), names=len(found.headings))])


def explain(
    rule: Annotated[str, typer.Argument(help='A rule, such as "VP>LD>DS/max" or "median(EQ)".')],
    experiment: Annotated[
        str,
        typer.Option(help="Recipe or file whose rules may be named.", autocompletion=recipe_names),
    ] = "quickstart",
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Print what a rule does in words, its formula, who measures what, and an example with three clients."""
    documents: list[dict[str, object]] = []
    parts: list[Block] = []
    for name, settings in parse_rules([rule], load(experiment, ask=asking(trust))).items():
        words, score, clients = reading(settings), formula(settings), example(settings)
        weighted = settings.trained_by == "clients"
        criteria = [_criterion(criterion.get(each), settings) for each in settings.criteria if weighted]
        documents.append({"rule": name, "reading": words, "formula": score, "criteria": criteria, "example": clients})
        algorithm = None if settings.algorithm is None else catalogue.known().get(settings.algorithm.name)
        trains = "" if algorithm is None else f" Training: {first_line(algorithm).partition(';')[0]}."
        parts.append(f"{name}: {words}.{trains}")
        if criteria:
            shares = "" if settings.policy else " Weight: its score / the sum of all scores."
            headings = ("criterion", "about the", "measured by", "trust", "what")
            parts += [
                f"Score of a client: {score}.{shares}",
                Table("", headings, tuple(tuple(each.values()) for each in criteria), names=5),
            ]
        rows = tuple(
            (client, *(f"{one:g}" for one in raw), f"{weight:.1%}") for client, (raw, weight) in clients.items()
        )
        parts += [Table("Example with three clients", ("client", *settings.criteria, "weight"), rows)] if rows else []
    emit(documents[0] if len(documents) == 1 else documents, format, parts)


def _criterion(found: criterion.Criterion, settings: WeighingSettings) -> dict[str, str]:
    """Return a criterion as lists show it, in the order of their columns."""
    return {
        "name": found.name,
        "about": found.about,
        "measured_by": found.measured_by,
        "trust": trust_of(found, settings),
        "description": found.description,
    }


def _rules() -> Listing:
    headings, rows = ("word", "kind", "what"), rule_words()
    return Listing([dict(zip(headings, row, strict=True)) for row in rows], headings, rows)


def _criteria() -> Listing:
    plain = WeighingSettings()
    every = [*criterion.known().values(), criterion.get("fact(NAME)")]
    found = [_criterion(each, plain) for each in every]
    return Listing(
        found, ("criterion", "about the", "measured by", "trust", "what"), [tuple(each.values()) for each in found]
    )


def _algorithms() -> Listing:
    found = [
        {
            "name": name,
            "description": first_line(made),
            "parameters": defaults_of(made),
            "keeps": list(made.keeps),
            "sends": list(made.sends),
        }
        for name, made in catalogue.known().items()
    ]
    rows = [(name, f"{first_line(made)} ({_parameters(made)})") for name, made in catalogue.known().items()]
    return Listing(found, ("algorithm", "what it changes at the client or the server, and its parameters"), rows)


def _parameters(made: type[Section]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in defaults_of(made).items()) or "no parameters"


def _policies() -> Listing:
    rows: list[tuple[str, ...]] = []
    for made in policy.known().values():
        needs = ", ".join(policy.needs_of(made)) or "nothing else"
        rows.append((made.name, f"{first_line(made)} (needs {needs}; {_parameters(made)})"))
    found = [policy.described(made) for made in policy.known().values()]
    return Listing(found, ("policy", "what it weights by, what it needs, and its parameters"), rows)


def _attacks() -> Listing:
    # For speed of start: attacks run studies, which need torch.
    from steelyard.data.flaws import FlawSettings
    from steelyard.studies.attack import ATTACKS

    rows = [
        (name, ", ".join(FlawSettings(**flaw, pick="random", share=0.2).words() for flaw in flaws))
        for name, flaws in ATTACKS.items()
    ]
    return Listing(
        dict(rows), ("attack", "what malicious clients do; NAME+inflation: they also claim a false size"), rows
    )


def _models() -> Listing:
    found: list[dict[str, object]] = []
    rows: list[tuple[str, ...]] = []
    for model in BUILT_IN:
        found.append(
            {
                "name": model.name,
                "purpose": model.purpose,
                "typical_shape": list(model.shape),
                "typical_outputs": model.outputs,
                "parameters": model.parameters,
                "fields": list(model.fields),
            }
        )
        shape = "×".join(map(str, model.shape)) if len(model.shape) > 1 else f"{prod(model.shape)} columns"
        outputs = counted(model.outputs, "output")
        size = f"{model.parameters:,} parameters for samples of {shape} and {outputs}"
        rows.append((model.name, f"{model.purpose}; {size}; fields: {', '.join(model.fields)}"))
    return Listing(found, ("model.name", 'what it is for; your own torch.nn.Module: name = "file.py:factory"'), rows)


def _recipes() -> Listing:
    described = {name: parse(entry.read_text(encoding="utf-8"), name) for name, entry in ready().items()}
    rows = [(name, " ".join(str(document.get("description", "")).split())) for name, document in described.items()]
    found = [{"name": name, "description": d.get("description", "")} for name, d in described.items()]
    return Listing(found, ("recipe", "what"), rows)


LISTINGS: Mapping[str, tuple[str, Callable[[], Listing]]] = {
    "rules": ("every word that a rule may hold: --rules of compare, --by of weigh", _rules),
    "criteria": ("what clients can be weighted by", _criteria),
    "algorithms": ("how clients train and the server updates", _algorithms),
    "policies": ("the published weighting methods", _policies),
    "attacks": ("what malicious clients may do: --attack", _attacks),
    "models": ("the built-in networks", _models),
    "recipes": ("the ready experiments", _recipes),
}
"""What `steelyard list` lists."""


def show(
    experiment: Annotated[
        str | None, typer.Argument(help="Name of a recipe, or path of a TOML file.", autocompletion=recipe_names)
    ] = None,
    changes: SetOption = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of an experiment file.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="With every default filled in.")] = False,
    split: Annotated[bool, typer.Option("--split", help="Draw how samples are partitioned over clients.")] = False,
    seed: SeedOption = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="With --split: also write it as a .svg, .png or .pdf file.")
    ] = None,
    format: FormatOption = "text",
) -> None:
    """Print an experiment as TOML, the schema of experiment files, or a drawing of an experiment's split."""
    if not split and (figure is not None or format != "text"):
        raise UserError(f"show: got {'--figure' if figure else f'--format {format}'}; allowed with: --split")
    if split and experiment is not None:
        _draw_split(load(experiment, changes or [], seed), figure, format)
        return

    if schema:
        emit(schema_with_texts(kind_of("learning") if experiment is None else type(load(experiment))), "json")
        return
    if experiment is None:
        raise UserError("show: no experiment named; allowed: a recipe, a file, or --schema")
    described = load(experiment, changes or [])
    if resolved and described.all_clients is not None:
        described = described.for_clients(described.all_clients)
    print(to_toml(described) if changes or resolved else source_text(experiment), end="")


def _draw_split(described: Description, figure: Path | None, format: Format) -> None:
    """Read the data of an experiment, share them out and draw that; nothing is trained."""
    from steelyard.data.partition import share_out
    from steelyard.data.scaling import load as load_data

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
    drawn = (Copied(line) for line in draw_letters(found, terminal_width()))
    emit(found, format, [*drawn, *account(found)])


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Literal["csv", "json", "parquet"], typer.Option("--to", help="Format of the tables.")] = "csv",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the files (default: DIR/export).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files of an earlier export.")] = False,
) -> None:
    """Write a run's rounds, clients and evaluations as files."""
    from steelyard.runs.export import export_run

    for path in export_run(History(folder), to, out, force=force):
        print(printable(str(path)))


def docs(
    words: Annotated[
        list[str] | None, typer.Argument(help="Look for these words, and open the page that fits best.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the pages into this folder (default: the cache).")
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
    if form != "images":
        from steelyard.experiment.data_check import check_data

        looked = check_data(load(str(file)))
        for line in looked.lines()[:MOST_FINDINGS]:
            print(printable(line))
        if len(looked.findings) > MOST_FINDINGS:
            print(f"all {len(looked.findings)} findings: steelyard check {shlex.quote(str(file))}")
        if looked.errors:
            print(f"next: mend {looked.errors[0].mend or 'the data'}, then steelyard check {shlex.quote(str(file))}")
            return
    print(f"next: steelyard run {shlex.quote(str(file))}")


MOST_FINDINGS = 5


def check(
    experiment: ExperimentArgument,
    changes: SetOption = None,
    seed: SeedOption = None,
    trust: TrustOption = False,
    accept: AcceptOption = None,
    format: Annotated[
        Literal["text", "json"], typer.Option("--format", help="text for people, json for programs.")
    ] = "text",
) -> None:
    """Look at an experiment's data, each site alone and all against each other; nothing is trained.

    Ends with 1 where a finding would stop a run.
    """
    # For speed of start: --help must not wait for torch.
    from steelyard.experiment.data_check import check_data

    looked = check_data(load(experiment, changes or [], seed, asking(trust))).accepting(accept or [])
    emit(looked, format, (), looked.lines())
    if looked.errors:
        raise typer.Exit(1)
