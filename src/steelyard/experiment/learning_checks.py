"""What does not go together in an experiment of kind "learning", refused before any data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base.errors import UserError, listed
from steelyard.data import DataSettings, FlawSettings, PartitionSettings
from steelyard.experiment.federations import FederationSettings
from steelyard.messages.algorithm import Algorithm
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.plan import RoundSettings
from steelyard.weighing.adafed import CLASS_METRICS
from steelyard.weighing.rule import WeighingSettings

_LOSSES: Mapping[str, Sequence[str]] = {
    "regression": ("barron", "none"),
    **dict.fromkeys(("survival", "segmentation", "multi-label"), ()),
}
"""What `weighing.loss.adapt` may be by task; `CLASS_METRICS` for classes."""


def check_late(
    rules: Mapping[str, FederationSettings], algorithm: AlgorithmSettings, privacy: PrivacySettings | None
) -> None:
    """Refuse updates that join the next round where they would be weighed or sent in a way that knows no such."""
    if privacy is not None and (privacy.central or privacy.local or privacy.aggregation):
        raise UserError(
            "clock.late: got 'next' with [privacy], whose noise and sums are made for the clients of one round; "
            "allowed: drop"
        )
    for name, rule in rules.items():
        settings = rule.algorithm or algorithm
        made = None if settings.plugins else settings.made()
        if rule.adjust is not None:
            raise UserError(f"clock.late: got 'next' with '{name}', which tries other orders; allowed: drop")
        if made is not None and (made.sends or made.listens):
            raise UserError(
                f"clock.late: got 'next' with {made.name}, whose clients give more than their models; allowed: drop"
            )


def check_untested(rules: Mapping[str, WeighingSettings], rounds: RoundSettings) -> None:
    """Refuse what looks at the clients' accuracy where they have no test rows."""
    if rounds.stop_at_target:
        raise UserError(
            "rounds.stop_at_target: got true with partition.test 'none', which leaves no accuracy to reach a "
            "target; allowed: partition.test = 'local' or 'held-out'"
        )
    for name, rule in rules.items():
        if rule.adjust is not None:
            raise UserError(
                f"weighing.adjust: '{name}' compares accuracies, and partition.test = 'none' leaves "
                "none; allowed: partition.test = 'local' or 'held-out'"
            )


def lacks_test_set(partition: PartitionSettings) -> str:
    """Say why the server has no rows to weigh on: none at all, or those that clients report on; empty if it has."""
    if partition.server == "none":
        return (
            "and partition.server = 'none' leaves it without one; allowed: partition.server = 'held-out' or 'fraction'"
        )
    if partition.server == "held-out" and partition.test == "held-out" and partition.server_report == "none":
        return (
            "and partition.server and partition.test both take the held-out rows, so that the same rows would weigh "
            "and report; allowed: partition.server_report = 'apart' (half weighs, half reports) or 'same' (as AdaFed's "
            "authors do), partition.server = 'fraction', or another partition.test"
        )
    return ""


def check_rule(rule: WeighingSettings, data: DataSettings, partition: PartitionSettings, loss: str) -> None:
    """Refuse a fit, a control or an adaptive loss that this data or partition cannot feed; `loss` is the clients'."""
    lacking = lacks_test_set(partition)
    if rule.fit is not None and lacking:
        raise UserError(f"weighing.fit: weights are fitted to the server's test set, {lacking}")
    if rule.trained_by == "server" and lacking:
        raise UserError(f"weighing.trained_by: the server trains on its test set, {lacking}")
    if rule.defence is not None and rule.defence.needs_root and lacking:
        raise UserError(f"weighing.defence.rule: fltrust trains on the server's test set, {lacking}")
    if rule.loss is None:
        return
    if rule.loss.adapt != "none" and lacking:
        raise UserError(f"weighing.loss: it adapts to the server's test set, {lacking}")
    task = data.capabilities().task
    fits = _LOSSES.get(task or "", CLASS_METRICS)
    if rule.loss.adapt not in fits and task is not None:
        raise UserError(
            f"weighing.loss.adapt: got '{rule.loss.adapt}' with data.source = '{data.source}'; "
            f"allowed: {listed(fits) or 'no [weighing.loss] with this task'}"
        )
    if rule.loss.adapt in ("barron", "none") and loss not in ("auto", "barron"):
        raise UserError(
            f"training.loss: got '{loss}' with weighing.loss.adapt = '{rule.loss.adapt}'; allowed: auto, barron"
        )


def check_federated(
    rules: Mapping[str, WeighingSettings], algorithms: Sequence[Algorithm], privacy: PrivacySettings | None
) -> None:
    """Refuse what across machines would disclose single updates, or what only a simulation can do."""
    listening = next((made.name for made in algorithms if made.listens), None)
    if listening is not None:
        raise UserError(
            f"algorithm.name: got '{listening}', whose clients test each other's models, which no node sends to "
            "another; allowed across machines: all algorithms but this"
        )
    aggregation = None if privacy is None else privacy.aggregation
    if aggregation is None:
        return
    if aggregation.kind != "secure":
        raise UserError(
            f"privacy.aggregation.kind: got '{aggregation.kind}', whose clients share a key, and nobody hands out keys "
            "across machines; allowed there: secure"
        )
    training = [name for name, rule in rules.items() if rule.trained_by == "clients"]
    if len(training) > 1:
        raise UserError(
            f"beside: {len(training)} rules with privacy.aggregation; in the first round each would give the "
            "server another weighted sum of the same updates; allowed across machines: one rule"
        )


def check_flaws_on_node(flaws: Sequence[FlawSettings], share: float | None) -> None:
    """Refuse flawed clients that look at more than a node sees; `share` of the clients take part in a round."""
    looking = [flaw.kind for flaw in flaws if flaw.needs_models]
    if share != 1 and looking:
        shown = "not given" if share is None else f"= {share:g}"
        raise UserError(
            f"flaws: got kind '{looking[0]}' with rounds.fraction {shown}, and a node does not see the models of "
            "rounds that it sits out; allowed across machines: rounds.fraction = 1"
        )
    seeing = [flaw.kind for flaw in flaws if flaw.sees_others]
    if seeing:
        raise UserError(
            f"flaws: got kind '{seeing[0]}', whose clients see the updates of all others, and a node sees only its "
            "own; allowed across machines: reversed, gaussian, backdoor, labels-flipped"
        )
