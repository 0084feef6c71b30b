"""Clients of unequal worth: what may be wrong with a client, and the `[[flaws]]` sections that say with which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from pydantic import Field, model_validator

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import Section
from steelyard.data.schemes import NUMBERED, PartitionSettings, client_name
from steelyard.data.sources.source import Count, DataSettings

FlawKind = Literal[
    "labels-flipped",
    "noisy",
    "blurred",
    "missing",
    "rows-repeated",
    "classes-missing",
    "few-steps",
    "stale",
    "own-model",
    "copy",
    "free-rider",
    "claims-size",
    "claims-criteria",
    "reversed",
    "gaussian",
    "alie",
    "ipm",
    "min-max",
    "adaptive",
    "boosted",
    "bias",
    "backdoor",
]

Way = Literal["uniform", "pairs", "class", "plain", "colluding", "all", "alie", "ipm", "drift", "pixels", "semantic"]

OMNISCIENT: frozenset[str] = frozenset({"alie", "ipm", "min-max", "adaptive"})
"""Attacks whose clients see the updates of all others of the cohort."""
NEEDS_CLASSES: frozenset[str] = frozenset({"labels-flipped", "classes-missing", "bias", "backdoor"})
"""Kinds that make no sense for a regression."""
WAYS: Mapping[str, tuple[str, ...]] = {
    "labels-flipped": ("uniform", "pairs", "class"),
    "free-rider": ("plain", "colluding"),
    "adaptive": ("all", "alie", "ipm", "drift"),
    "backdoor": ("pixels", "semantic"),
}
"""By kind: the ways that `how` may name, the default first."""
AIMED: frozenset[str] = frozenset({"backdoor", "bias"})
"""Kinds that have a `target`, beside labels flipped by class."""
CLAIMS: frozenset[str] = frozenset({"claims-size", "claims-criteria"})
"""Kinds that may begin in a later round."""


class Amount(NamedTuple):
    """What `amount` may be for one kind of flaw."""

    default: float
    allowed: str
    least: float
    most: float
    least_itself: bool = False
    """Whether the least is allowed itself."""
    most_itself: bool = True
    """Whether the most is allowed itself."""
    whole: bool = False

    def fits(self, value: float) -> bool:
        """Say whether a kind takes this amount."""
        above = value >= self.least if self.least_itself else value > self.least
        below = value <= self.most if self.most_itself else value < self.most
        return math.isfinite(value) and above and below and (not self.whole or value == int(value))


AMOUNTS: Mapping[str, Amount] = {
    "labels-flipped": Amount(1.0, "more than 0, at most 1 (share of its rows)", 0, 1),
    "noisy": Amount(1.0, "more than 0 (standard deviations)", 0, math.inf),
    "blurred": Amount(1.0, "more than 0, at most 100 (sigma in pixels)", 0, 100),
    "missing": Amount(0.5, "more than 0, at most 1 (share of the columns or pixels)", 0, 1),
    "rows-repeated": Amount(10, "1 or more (times each row is there)", 1, math.inf, least_itself=True),
    "classes-missing": Amount(0.5, "more than 0, less than 1 (share of its classes)", 0, 1, most_itself=False),
    "few-steps": Amount(0.1, "more than 0, at most 1 (share of its rows)", 0, 1),
    "stale": Amount(5, "a whole number from 1 (rounds)", 1, math.inf, least_itself=True, whole=True),
    "claims-size": Amount(10, "more than 0 (times its number of samples)", 0, math.inf),
    "claims-criteria": Amount(1000, "more than 0 (times what is true)", 0, math.inf),
    "reversed": Amount(1, "more than 0 (times its own update)", 0, math.inf),
    "gaussian": Amount(10, "more than 0 (times the size of its own update)", 0, math.inf),
    "alie": Amount(1.5, "more than 0 (standard deviations)", 0, math.inf),
    "ipm": Amount(2, "more than 0 (times the mean update)", 0, math.inf),
    "boosted": Amount(1, "more than 0 (1: as much as replaces the model)", 0, math.inf),
    "bias": Amount(1, "more than 0 (times the length of its own update)", 0, math.inf),
    "backdoor": Amount(0.5, "more than 0, at most 1 (share of its rows)", 0, 1),
}
"""By kind, for the kinds that have an amount."""


class FlawSettings(Section):
    """One flaw and who has it; use one `[[flaws]]` section for each, applied in the order written.

    Who: `clients` by name, or `pick` with `share` or `count`. What: `kind`, with its `amount`. Only what a client
    trains on and how it behaves is touched: local test sets and the server's rows stay clean and true.
    """

    kind: FlawKind
    """What is wrong with these clients.
    labels-flipped: `amount` of its training rows, drawn at random and rounded, have a wrong label (see `how`).
    noisy: Gaussian noise on every number of its training rows, with `amount` times the standard deviation of the
    clients' clean training rows (of each column of a table, of all pixels of images). Pixels stay in their range, which
    is 0 to 255 for bytes, else from the least to the greatest that clients train on.
    blurred: its images are blurred by a Gaussian of sigma `amount` in pixels, edge pixels repeated beyond the edge;
    where rows have a mark `sharp` (criterion IS), it becomes 0.
    missing: `amount` of its columns (tables) or pixels (images, all channels), rounded, at least 1, drawn once for all
    its rows, hold nothing. That is the column's mean over the clients' clean training rows, or 0 for pixels. Where rows
    have a mark `complete` (criterion completeness), it falls by that share.
    rows-repeated: it keeps 1/`amount` of its rows, rounded, at least 1, drawn at random, and repeats them until it has
    as many rows as before.
    classes-missing: it loses all training rows of `amount` of the classes it has, rounded, at least 1 and never all; it
    has fewer rows then.
    few-steps: each round it trains on `amount` of its rows only, rounded, at least 1, drawn anew, but reports all.
    stale: it starts from the global model of `amount` rounds ago (before that many rounds: from the first model).
    own-model: it ignores the model it receives and goes on training its own.
    copy: not a fault of a client but one more client, with the training and test rows that `of` or the picked ones have
    at this point. It is numbered after the others (people: NAME-copy-0, NAME-copy-1), and further flaws can name it.
    free-rider: it does not train and returns the model it received, pretending to have done all steps.
    claims-size: it reports `amount` times its number of samples, in the criterion DS too.
    claims-criteria: of every criterion that it measures itself it reports the most that can be true (LE 1, LD the
    number of classes), or where there is none `amount` times what is true, of its number of samples too.
    Hostile clients, which send another update than theirs (u is their own, μ and σ the mean and standard deviation of
    the honest updates of the cohort, coordinate by coordinate; docs/reference/defence.md has the formulas):
    reversed: −`amount` · u. gaussian: normal noise, `amount` times as large as u. alie: μ − `amount` · σ. ipm:
    −`amount` · μ. min-max: μ − γσ with the greatest γ that is no further from any honest update than two of them are.
    adaptive: it knows the rule; each round all such clients try it on some eighty candidates and send the worst (see
    `how`).
    boosted: `amount` · n/m · u, n clients of which m do so, to replace the model (after backdoor or labels-flipped,
    with pick = "same").
    bias: u, and `amount` times its length on the bias of the class `target`.
    backdoor: `amount` of its training rows have the class `target` and a mark that stands for it (see `how`)."""
    amount: int | float | None = None
    """How much; each kind says of what. Defaults: labels-flipped 1, noisy 1, blurred 1, missing 0.5, rows-repeated 10,
    classes-missing 0.5, few-steps 0.1, stale 5, claims-size 10, claims-criteria 1000, reversed 1, gaussian 10,
    alie 1.5, ipm 2, boosted 1, bias 1, backdoor 0.5; the other kinds have none."""
    how: Way | None = None
    """labels-flipped: uniform (default): any other class, all equally likely; pairs: class c becomes c + 1, the last
    one 0; class: rows of the one class in `classes` become `target`.
    free-rider: plain (default): the model it received; colluding: all of them repeat the last step of the global model,
    each with a little noise.
    adaptive: which candidates are tried: all (default), or alie, ipm or drift alone, with tuned factors.
    backdoor: pixels (default): a bright square in the corner; semantic: unchanged images, the brightest quarter of the
    one class in `classes` (default: the one after `target`), in place of `amount` of its rows."""
    classes: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """classes-missing: the classes that all clients of this section lose, in place of some drawn for each by itself.
    labels-flipped by class, semantic backdoor: the one class that is to be taken for `target`."""
    target: Annotated[int, Field(ge=0)] | None = None
    """backdoor, bias, labels-flipped by class: the class that is to be answered. Default 0."""
    from_round: Count | None = None
    """claims-size, claims-criteria: the round in which the lies begin. Default 1."""
    of: str | None = None
    """copy: id of the client whose rows are copied."""
    clients: tuple[str, ...] = ()
    """Ids of the clients that have this flaw, such as client-003."""
    pick: Literal["biggest", "smallest", "random", "same"] | None = None
    """Instead of names. biggest, smallest: the clients with the most or the fewest training rows, counted before any
    flaw (of equal ones the earlier id first); random: clients drawn by the seed, never copies; same: those of the
    section before (after copy the new clients), so that flaws add up."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """pick: this share of all clients, copies not counted; rounded, at least 1, at most those there are to pick."""
    count: Count | None = None
    """pick: so many clients."""
    among: Literal["unflawed", "all"] = "unflawed"
    """pick: from the clients that no earlier section gave a flaw, or from all."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Fill in what depends on the kind, so that a run's file shows it."""
        if not isinstance(given, Mapping):
            return given
        fields: dict[str, Any] = dict(cast("Mapping[str, Any]", given))
        kind = fields.get("kind")
        if isinstance(kind, str) and kind in AMOUNTS and fields.get("amount") is None:
            fields["amount"] = AMOUNTS[kind].default
        if isinstance(kind, str) and kind in WAYS and fields.get("how") is None:
            fields["how"] = WAYS[kind][0]
        if (kind in AIMED or fields.get("how") == "class") and fields.get("target") is None:
            fields["target"] = 0
        return fields

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check_amount()
        if self.how is not None and self.how not in WAYS.get(self.kind, ()):
            ways = WAYS.get(self.kind)
            allowed = f"allowed with: {listed(WAYS)}" if ways is None else f"allowed: {listed(ways)}"
            raise ValueError(f"how: got '{self.how}' with kind '{self.kind}'; {allowed}")
        self._check_classes()
        if self.from_round is not None and self.kind not in CLAIMS:
            raise ValueError(
                f"from_round: got {self.from_round} with kind '{self.kind}'; allowed with: {listed(sorted(CLAIMS))}"
            )
        if self.of is not None and self.kind != "copy":
            raise ValueError(f"of: got '{self.of}' with kind '{self.kind}'; allowed with: copy")
        self._check_who()
        return self

    def _check_classes(self) -> None:
        one = self.how in ("class", "semantic")
        if self.classes and not (one or self.kind == "classes-missing"):
            raise ValueError(
                f"classes: got some with kind '{self.kind}'; allowed with: classes-missing, labels-flipped by class, a "
                "semantic backdoor"
            )
        if self.target is not None and not (self.kind in AIMED or self.how == "class"):
            raise ValueError(
                f"target: got {self.target} with kind '{self.kind}'; allowed with: backdoor, bias, labels-flipped by "
                "class"
            )
        if (one and len(self.classes) > 1) or (self.how == "class" and not self.classes):
            raise ValueError(f"classes: got {len(self.classes)} with how '{self.how}'; allowed: one class")
        if one and self.classes and self.classes[0] == self.target:
            raise ValueError(f"classes: got {self.target}, which is the target too; allowed: another class")

    def _check_amount(self) -> None:
        if self.amount is None:
            return
        if self.kind not in AMOUNTS:
            raise ValueError(
                f"amount: got {self.amount} with kind '{self.kind}', which has none; allowed: leave it out"
            )
        if not AMOUNTS[self.kind].fits(self.amount):
            raise ValueError(
                f"amount: got {self.amount} with kind '{self.kind}'; allowed: {AMOUNTS[self.kind].allowed}"
            )

    def _check_who(self) -> None:
        if self.kind == "copy" and self.clients:
            raise ValueError("clients: got names with kind 'copy'; allowed: of, the client that is copied, or pick")
        named = self.of is not None if self.kind == "copy" else bool(self.clients)
        if named == (self.pick is not None):
            field = "of" if self.kind == "copy" else "clients"
            got = f"both {field} and pick" if named else f"neither {field} nor pick"
            raise ValueError(f"pick: got {got}; allowed: one of the two")
        if self.pick is None:
            for field in ("share", "count"):
                if getattr(self, field) is not None:
                    raise ValueError(f"{field}: got {getattr(self, field)} without pick; allowed with: pick")
        elif self.pick == "same":
            for field in ("share", "count"):
                if getattr(self, field) is not None:
                    raise ValueError(f"{field}: got {getattr(self, field)} with pick 'same'; allowed: leave it out")
        elif (self.share is None) == (self.count is None):
            got = "neither" if self.share is None else "both"
            raise ValueError(f"share: got {got} share and count with pick; allowed: one of the two")

    @property
    def size(self) -> float:
        """The amount; 1 for kinds without one."""
        return 1.0 if self.amount is None else float(self.amount)

    @property
    def names(self) -> tuple[str, ...]:
        """The clients named, or the one that is copied; empty with `pick`."""
        return (self.of,) if self.of is not None else self.clients

    def wanted(self, everyone: int) -> int:
        """Return how many of `everyone` clients are to be picked."""
        return self.count if self.count is not None else max(1, math.floor((self.share or 0) * everyone + 0.5))


def check_flaws(data: DataSettings, partition: PartitionSettings, flaws: Sequence[FlawSettings]) -> None:
    """Refuse flaws that this source or partition can never have; call it before any data is read."""
    for index, flaw in enumerate(flaws):
        if flaw.pick == "same" and index == 0:
            raise UserError("flaws.0.pick: got 'same' in the first section; allowed: biggest, smallest, random")
        if flaw.kind in NEEDS_CLASSES and data.capabilities().task not in (None, "classes"):
            raise UserError(
                f"flaws.{index}.kind: got '{flaw.kind}' with data.source '{data.source}'; "
                "allowed: kinds without classes (this data has none)"
            )
    count = partition.client_count
    if flaws and partition.scheme in NUMBERED and count is not None:
        _check_names(flaws, count)


def _check_names(flaws: Sequence[FlawSettings], count: int) -> None:
    known = [client_name(number, count) for number in range(count)]
    chosen = 0
    for index, flaw in enumerate(flaws):
        for name in flaw.names:
            if name not in known:
                field = "of" if flaw.kind == "copy" else "clients"
                raise UserError(
                    f"flaws.{index}.{field}: got '{name}'{nearest(name, known)}; allowed: {known[0]} to {known[-1]}"
                )
        if flaw.count is not None and flaw.count > count:
            raise UserError(f"flaws.{index}.count: got {flaw.count}; allowed: at most {count}, all clients")
        if flaw.pick != "same":
            chosen = len(flaw.names) or min(flaw.wanted(count), count)
        if flaw.kind == "copy":
            known += [client_name(len(known) + number, count) for number in range(chosen)]
