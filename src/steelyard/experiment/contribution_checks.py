"""Whether a run can say what its clients added: held against [privacy], the partition and the algorithms."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.base.errors import UserError
from steelyard.data import PartitionSettings
from steelyard.messages.algorithm import Algorithm
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.contributions import ContributionSettings


def check_private(privacy: PrivacySettings | None, field: str) -> None:
    """Refuse whatever would disclose more of single updates than [privacy] guarantees."""
    if privacy is None:
        return
    if privacy.central is not None or privacy.local is not None:
        section = "central" if privacy.central is not None else "local"
        raise UserError(
            f"{field}: this run has [privacy.{section}], and what is read from single updates is a release that its "
            "budget does not count; allowed: runs without differential privacy"
        )
    if privacy.aggregation is not None:
        raise UserError(
            f"{field}: this run has [privacy.aggregation], kind '{privacy.aggregation.kind}', which hides single "
            "updates from the server; allowed: runs whose server sees them"
        )


def check_measure(
    settings: ContributionSettings, partition: PartitionSettings, *, counted: bool, field: str = "contributions"
) -> None:
    """Refuse a measure for which the run has no rows, and one that only classes have."""
    if settings.method == "classes":
        if not counted:
            raise UserError(
                f"{field}.method: got 'classes' for data without classes; allowed: shapley, leave-one-out, with a loss"
            )
        return
    if settings.measure.endswith("accuracy") and not counted:
        raise UserError(
            f"{field}.measure: got '{settings.measure}' for data without classes; allowed: loss, local-loss"
        )
    if not settings.on_clients and partition.server == "none":
        raise UserError(
            f"{field}.measure: got '{settings.measure}', and partition.server = 'none' leaves the server without rows; "
            "allowed: local-loss, local-accuracy, or partition.server = 'fraction' or 'held-out'"
        )
    if settings.on_clients and partition.test == "none":
        raise UserError(
            f"{field}.measure: got '{settings.measure}', and partition.test = 'none' leaves clients without test rows; "
            "allowed: loss, accuracy, or partition.test = 'local' or 'held-out'"
        )


def check_common_model(algorithms: Sequence[Algorithm]) -> None:
    """Refuse algorithms whose clients use models of their own: what they add to the common one says little."""
    personal = next((made.name for made in algorithms if made.personal), None)
    if personal is not None:
        raise UserError(
            f"contributions: the clients of '{personal}' use models of their own, not the common one; allowed: "
            "algorithms with one model for all"
        )
