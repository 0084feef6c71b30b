"""Recommenders: `steelyard recommend ... --format json`."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.report.documents.shared import Metrics


class ListedItem(TypedDict):
    """One item of a user's list."""

    rank: int
    item: str
    title: str
    score: float
    in_test: bool


class Communication(TypedDict):
    """What a recommender sent, and the thesis' formula where it applies."""

    users_per_round: int
    triples: int
    rounds_per_epoch: int
    rounds: int
    cce_vectors: NotRequired[float]
    tcc_vectors: NotRequired[float]
    sent_vectors: int
    sent_vectors_down: int
    sent_vectors_up: int
    sent_bytes_down: int
    sent_bytes_up: int


class RecommenderReport(TypedDict):
    """All metrics of a recommender's lists by cutoff, its data, and what it sent."""

    metrics: Metrics
    communication: Communication
    data: list[str]
    sampled: NotRequired[dict[str, float]]


class FeatureReason(TypedDict):
    """A feature that made part of an item's score: part = gain x (personal + common)."""

    feature: str
    hops: int
    share: float
    part: float
    gain: float
    personal: float
    common: float


class Explanation(TypedDict):
    """Why an item has its score for a user."""

    user: str
    item: str
    title: str
    score: float
    features_of_user: int
    features_of_item: int
    reasons: list[FeatureReason]


class KeptFeatures(TypedDict):
    """Quartiles over users of the share of their features that their lists keep, by reading and number of features."""

    cutoff: int
    kept: dict[str, dict[str, list[float | None]]]
    prominent: int
    prominent_after: int
    prominent_kept: float | None


class CloudWord(TypedDict):
    """A prominent feature before or after recommendation."""

    when: str
    rank: int
    feature: str
    weight: float
