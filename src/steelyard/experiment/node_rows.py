"""Which rows and columns of a node's own file an experiment gets: those that the node's file says, whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from steelyard.base.errors import UserError, brief, listed
from steelyard.base.settings import Section, validated
from steelyard.base.usercode import NotAllowed
from steelyard.clients.node import NodeConfig
from steelyard.data import DataSettings, PartitionSettings
from steelyard.data.files import file_digest, find
from steelyard.data.sources.source import FileSource

if TYPE_CHECKING:
    # Only for annotations: the process of a node that speaks to the server does without torch.
    from steelyard.data.dataset import Population

SectionT = TypeVar("SectionT", bound=Section)

_SPLIT = ("test", "test_fraction", "minimum", "seed")
"""Fields of `[partition]` that mean something for a file of named clients' own rows."""


def own_partition(node: NodeConfig, *, held_out: bool, seed: int) -> PartitionSettings:
    """Return how this node's own rows are split, the same for every experiment.

    For a file of named clients' own rows: each owner is a client, tested on the file's own test part where it has one
    (`held_out`), else on a fifth of its rows, drawn by `seed`. For a share of a file: what `[partition]` says.
    """
    given: dict[str, Any] = dict(node.partition)
    where = "node config partition"
    if node.part is None:
        if other := [name for name in given if name not in _SPLIT]:
            raise UserError(f"{where}.{other[0]}: has no effect for named clients; allowed: {listed(_SPLIT)}")
        test = given.get("test", "held-out" if held_out else "local")
        given = {"scheme": "given" if test == "held-out" else "natural", "test": test, "seed": seed, **given}
    elif given.get("seed") is None:
        raise UserError(
            f"{where}.seed: missing beside partition-id and data; allowed: a table [partition] as the "
            "experiment's, with a seed, so that no server chooses who has which rows"
        )
    return validated(PartitionSettings, given, where)


def own_seed(node: NodeConfig) -> int:
    """Return a number that follows from the node's file and that nobody without it can know."""
    assert node.data is not None
    return int(file_digest(find(node.data, "this node's data", field="path (node config data)")), 16) % 10**18


def refuse_few(what: str, rows: float, node: NodeConfig, allowed: str) -> None:
    """Refuse an experiment whose answers would rest on fewer rows than this node's owner allows."""
    if rows < node.min_rows:
        raise NotAllowed(f"{what}, and this node answers with {node.min_rows} rows or more; allowed: {allowed}")


def own_reading(section: type[SectionT], node: NodeConfig, **usual: Any) -> SectionT:
    """Return how this node's file is read: its table [data], with `usual` for what that does not say."""
    return validated(section, {**usual, **node.reading, "path": str(node.data)}, "node config data")


def with_enough(
    population: Population, rows_behind: Callable[[int, int], float], node: NodeConfig
) -> tuple[Population, tuple[str, ...]]:
    """Return a population without clients whose updates would rest on too few rows, and why, for the owner.

    `rows_behind` says, of a client's training rows, how many of so many are behind an update.
    """
    sizes = {rows.client: len(rows.train) for rows in population.clients}
    behind = {client: rows_behind(size, size) if size else 0.0 for client, size in sizes.items()}
    kept = tuple(rows for rows in population.clients if behind[rows.client] >= node.min_rows)
    if not kept:
        enough = any(len(rows.train) >= node.min_rows for rows in population.clients)
        what = "training.batch_size: with this learning_rate, weight_decay, steps and algorithm, few rows are behind "
        what += "an update"
        few = what if enough else "min-rows: no client here has enough rows to train on"
        refuse_few(few, 0, node, "larger batches (full), more steps, less weight decay" if enough else "other nodes")
    notes = (
        f"{name} takes no part: an update would rest on {rows:.3g} rows, and min-rows is {node.min_rows}"
        for name, rows in behind.items()
        if rows < node.min_rows
    )
    return replace(population, clients=kept), tuple(notes)


_FREE = ("path", "attributes", "identities", "catalogue", "normalise", "scales", "agreed", "size", "colours")
"""Fields that an experiment may choose: files are the node's own anyway, and the others change no row's part."""


def as_read(asked: DataSettings, node: NodeConfig) -> DataSettings:
    """Return how this node's file is read; without a table [data], as the source's defaults say."""
    if not node.reading and asked.source == "csv":
        raise NotAllowed(
            "data.source: got 'csv', but this node's configuration does not name the columns of its file; allowed: a "
            "table [data] there"
        )
    own = own_reading(DataSettings, node, source=asked.source)
    if not isinstance(own, FileSource) or not isinstance(asked, FileSource):
        return own.model_copy(update={"seed": asked.seed})
    unsaid: dict[str, Any] = {"classes": asked.classes} if own.classes is None else {}
    if own.share == 1:
        unsaid["seed"] = asked.seed
    return own.model_copy(update=unsaid)


def refuse_other(name: str, asked: Section, own: Section) -> None:
    """Refuse a section of an experiment that would read or share out a node's own file otherwise than `own`."""
    for field in type(asked).model_fields:
        value = getattr(asked, field)
        if field not in _FREE and value != getattr(own, field):
            raise NotAllowed(
                f"{name}.{field}: got {brief(value)}, but this node's own configuration decides how its rows are read "
                "and shared out; allowed: the value there"
            )
