"""Systems to stand beside FPL: each sees all training data at once, but for FCF, which is federated too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.recommend.baselines import factors, neighbours, networks
from steelyard.recommend.evaluate import best_unseen
from steelyard.recommend.histories import Histories
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import Floats, Scores

Maker = Callable[..., Scores]
Setting = float | int | str

BASELINES: Mapping[str, Maker] = {
    "random": neighbours.random,
    "popular": neighbours.popular,
    "user-knn": neighbours.user_knn,
    "item-knn": neighbours.item_knn,
    "svd": factors.svd,
    "mf": networks.mf,
    "neumf": networks.neumf,
    "bpr-mf": factors.bpr_mf,
    "bpr": factors.bpr,
    "kahfm": factors.kahfm,
    "vae": networks.vae,
    "fcf": factors.fcf,
    "vsm": neighbours.vsm,
}
"""The baselines by name: each takes training interactions and a seed, some item features, and returns scores."""


def maker(kind: str) -> Maker:
    """Return the baseline of that name, or say which there are."""
    if kind not in BASELINES:
        raise UserError(f"baseline: got '{kind}'{nearest(kind, BASELINES)}; allowed: {listed(BASELINES)}")
    return BASELINES[kind]


def settings_of(kind: str, assignments: Sequence[str]) -> dict[str, Setting]:
    """Read "neighbours=50", "similarity=jaccard" and the like; what the baseline does not have is refused."""
    parameters = inspect.signature(maker(kind), eval_str=True).parameters
    known = {name: each for name, each in parameters.items() if name not in ("train", "features", "seed")}
    found: dict[str, Setting] = {}
    for text in assignments:
        name, _, value = text.partition("=")
        if name not in known:
            raise UserError(
                f"--set: baseline {kind} has no '{name}'{nearest(name, known)}; allowed: {listed(known) or 'none'}"
            )
        words = get_args(known[name].annotation)
        found[name] = _word(name, value, words) if words else _number(name, value, known[name].default)
    return found


def _word(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise UserError(f"--set: {name} is {brief(value)}{nearest(value, allowed)}; allowed: {listed(allowed)}")
    return value


def _number(name: str, value: str, default: float | int) -> float | int:
    """Refuse what a baseline cannot use; its default says whether it counts something."""
    try:
        number = int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        raise UserError(f"--set: {name} is {brief(value)}; allowed: a number") from None
    if isinstance(default, int):
        most = 10_000 if name in ("factors", "latent", "hidden") else 100_000
        if not isinstance(number, int) or not 1 <= number <= most:
            raise UserError(f"--set: {name} is {brief(number)}; allowed: a whole number from 1 to {most:,}")
    elif not 0 <= number <= 1e6 or (name == "rate" and number == 0):
        raise UserError(f"--set: {name} is {brief(number)}; allowed: {'more than 0' if name == 'rate' else '0'} to 1e6")
    return number


def needs_features(kind: str) -> bool:
    """Whether a baseline looks at what is known of items."""
    return "features" in inspect.signature(maker(kind)).parameters


def recommend(
    kind: str,
    train: Interactions,
    cutoff: int,
    seed: int = 1,
    settings: Mapping[str, Setting] | None = None,
    features: ItemFeatures | None = None,
) -> tuple[Codes, Floats]:
    """Train a baseline and return each user's k best items that she did not train on, with their scores.

    `features` are those of the items of `train`, in their order, for baselines that look at them.
    """
    known: dict[str, Any] = dict(settings or {})
    if needs_features(kind):
        if features is None:
            raise UserError(f"baseline: {kind} needs features of items; allowed: with --knowledge EXPERIMENT")
        known["features"] = features
    return best_unseen(Histories.of(train), maker(kind)(train, seed=seed, **known), cutoff)
