"""`steelyard recommend features`: what the section [knowledge] of an experiment makes of its files.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import ExperimentArgument, FormatOption, SetOption
from steelyard.cli.printing import print_json
from steelyard.errors import UserError, brief, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steelyard.experiment.description import Description
    from steelyard.recommend.interactions import Names
    from steelyard.recommend.knowledge.features import ItemFeatures
    from steelyard.recommend.knowledge.settings import KnowledgeSettings


def features(
    experiment: ExperimentArgument,
    item: Annotated[str | None, typer.Option(help="Also list the features of this item.")] = None,
    changes: SetOption = None,
    format: FormatOption = "text",
) -> None:
    """Show how many features came from which hop of the knowledge graph, and what was dropped where."""
    from steelyard.data.files import find
    from steelyard.experiment.loading import load
    from steelyard.recommend.knowledge.loading import load as load_knowledge
    from steelyard.recommend.knowledge.naming import counted
    from steelyard.recommend.run_data import filtered_interactions

    described = load(experiment, changes or [])
    knowledge = knowledge_of(described, experiment)
    interactions = described.interactions  # pyright: ignore[reportAttributeAccessIssue]
    path = find(interactions.path, "a table of interactions", field="path (interactions.path)")
    data = filtered_interactions(path, interactions)
    found = load_knowledge(knowledge, data.items)
    names: list[str] | None = None
    if item is not None:
        if item not in data.items:
            raise UserError(f"--item: got {brief(item)}; allowed: one of {len(data.items):,} items of {experiment}")
        names = found.features.names_of(data.items.tolist().index(item))
    if format == "json":
        document = {"experiment": described.name, **found.report.document()}
        print_json(document | ({} if names is None else {"item": names}))
        return
    for line in found.report.lines():
        typer.echo(printable(line))
    if names is not None:
        typer.echo(printable(f"{item} has {counted(len(names), 'feature')}{':' if names else ''}"))
        for name in names:
            typer.echo(printable(f"  {name}"))


def features_of(experiment: str, items: Sequence[str] | Names) -> ItemFeatures:
    """Return the features of these items that the section [knowledge] of an experiment gives."""
    from steelyard.experiment.loading import load
    from steelyard.recommend.knowledge.loading import load_features

    return load_features(knowledge_of(load(experiment), experiment), items)


def knowledge_of(described: Description, experiment: str) -> KnowledgeSettings:
    """Return the section [knowledge] of an experiment of a kind that has one; else say what is missing."""
    found = getattr(described, "knowledge", None)
    if found is None:
        raise UserError(f"knowledge: {brief(experiment)} has no section [knowledge]; allowed: a recommender with one")
    return found
