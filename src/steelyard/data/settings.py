"""The settings of this package: `[data]`, `[partition]` and `[[flaws]]`, and whether they go together."""

from __future__ import annotations

from steelyard.base.errors import UserError
from steelyard.data.flaw_settings import FlawSettings, check_flaws
from steelyard.data.partition_settings import NUMBERED, PartitionSettings, client_name
from steelyard.data.source_settings import DataSettings
from steelyard.data.sources import without_classes

__all__ = [
    "NUMBERED",
    "DataSettings",
    "FlawSettings",
    "PartitionSettings",
    "check_flaws",
    "check_together",
    "client_name",
]


def check_together(data: DataSettings, partition: PartitionSettings) -> None:
    """Refuse a partition that this source can never give; call it before any data is read."""

    def refuse(field: str, value: object, allowed: str) -> None:
        raise UserError(f"partition.{field}: got {value!r} with data.source '{data.source}'; allowed: {allowed}")

    known = data.capabilities()
    for field in ("test", "server"):
        value = getattr(partition, field)
        if value == "held-out" and not known.held_out:
            hint = "local, none" if field == "test" else "fraction, none"
            refuse(field, value, f"{hint} (the source has no test part of its own)")
    if partition.scheme == "given" and not known.splits_owners:
        refuse(
            "scheme",
            partition.scheme,
            "iid, shard, labels, dirichlet, quantity, natural, table (the source does not split its users' rows)",
        )
    if partition.scheme == "natural" and not known.owners:
        refuse(
            "scheme",
            partition.scheme,
            "iid, shard, labels, dirichlet, quantity, table (the source does not know whose rows they are)",
        )
    if known.task not in (None, "classes") and partition.scheme in without_classes(known.task):
        kept = "iid, quantity" if "shard" in without_classes(known.task) else "iid, shard, quantity"
        why = "or natural where the source knows people (this data has no classes)"
        refuse("scheme", partition.scheme, f"{kept}, {why}")
    if known.classes and partition.table and len(partition.table[0]) != known.classes:
        refuse("table", f"lines of {len(partition.table[0])} counts", f"lines of {known.classes} counts")
