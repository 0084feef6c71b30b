"""[rounds] and [contributions]: the sections that configure the loop; when a target counts as reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.base.files import read_csv
from steelyard.base.marks import DataFile
from steelyard.base.settings import Section
from steelyard.base.tallies import Leading
from steelyard.messages.updates import Counts, Floats, Updates

SELECT = "rounds/select"
"""Under this name a federation remembers what is known of clients for the next selection."""
Known = Mapping[str, Mapping[str, float]]
"""Of each client by name: the round in which it was last `asked`, and its `loss`, `samples` and `score` then."""
_COLUMNS = ["client", "from", "to"]


class SelectSettings(Section):
    """[rounds.select]: who is asked in each round; `select = "round-robin"` is short for `select.by`."""

    by: Literal["uniform", "power-of-choice", "round-robin", "score"] = "uniform"
    """uniform: every cohort alike; power-of-choice: high losses among some candidates; round-robin: in turn; score:
    high scores of the weighing rule, with some exploration."""
    candidates: int | None = Field(default=None, ge=1)
    """power-of-choice: d, how many candidates are drawn in each round; default: twice the cohort."""
    explore: float = Field(default=0.1, ge=0, le=1)
    """score: the share of each cohort that is drawn from clients that were never asked, or else from all others."""
    path: Annotated[Path, DataFile(with_settings=True)] | None = None
    """A CSV file with the columns client, from, to: when each client is there, one row for each stretch of time, in
    rounds (both ends count) or, with [clock], in simulated seconds. It is put into `available`, so that a run records
    it."""
    available: dict[str, tuple[tuple[float, float], ...]] = Field(default_factory=dict)
    """By client: the stretches of time in which it is there; a client that is not named here always is."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"by": given}
        if not isinstance(given, Mapping):
            return given
        document: dict[str, Any] = {**given}
        if document.get("path") is None:
            return document
        path = document.pop("path")
        if document.get("available"):
            raise ValueError(f"available: given here and in {path}; allowed: one of the two")
        return {**document, "available": read_trace(Path(str(path)))}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.candidates is not None and self.by != "power-of-choice":
            raise ValueError(f"candidates: got {self.candidates} with by = '{self.by}'; allowed with: power-of-choice")
        for client, stretches in self.available.items():
            for begin, end in stretches:
                if begin > end:
                    raise ValueError(
                        f"available.{client}: got {begin:g} to {end:g}; allowed: the end not before the begin"
                    )
        return self

    @property
    def plain(self) -> bool:
        """Whether every cohort is as likely as every other."""
        return self.by == "uniform" and not self.available

    def there(self, names: Sequence[str], now: float) -> list[str]:
        """Return who is there at a time, ascending."""
        always = ((-math.inf, math.inf),)
        return sorted(
            name for name in names if any(begin <= now <= end for begin, end in self.available.get(name, always))
        )

    def next_time(self, names: Sequence[str], now: float) -> float | None:
        """Return the next time after now at which somebody comes; None where nobody ever does."""
        times = [begin for name in names for begin, _ in self.available.get(name, ()) if begin > now]
        return min(times, default=None)

    def chosen(self, seed: int, round: int, names: Sequence[str], size: int, known: Known) -> list[str]:
        """Return so many of these clients, ascending; `known` is what `after` returned for the round before."""
        if self.by == "uniform" or size >= len(names):
            return randomness.choose(seed, round, names, min(size, len(names)))
        ordered = sorted(names)
        chance = randomness.uniforms(randomness.stream_keys(seed, round, ordered, "select"), 2)
        if self.by == "round-robin":
            # Within a turn the order is the same in every round, drawn once.
            turn = randomness.uniforms(randomness.stream_keys(seed, 0, ordered, "select"), 1)[:, 0]
            asked = [known.get(name, {}).get("asked", 0) for name in ordered]
            picked = np.lexsort((turn, np.array(asked)))[:size]
        elif self.by == "power-of-choice":
            picked = self._by_loss(ordered, size, known, chance)
        else:
            picked = self._by_score(ordered, size, known, chance)
        return [ordered[index] for index in sorted(picked.tolist())]

    def _by_loss(self, names: Sequence[str], size: int, known: Known, chance: Floats) -> NDArray[np.intp]:
        sizes = [known[name]["samples"] for name in names if "samples" in known.get(name, {})]
        usual = float(np.mean(sizes)) if sizes else 1.0
        share = np.array([known.get(name, {}).get("samples", usual) for name in names])
        # The largest of u^(1/p): a draw without replacement, each with a chance by its size p (Efraimidis, Spirakis).
        drawn = np.argsort(-np.log(np.maximum(chance[:, 0], 1e-300)) / share, kind="stable")
        drawn = drawn[: max(size, self.candidates or 2 * size)]
        losses = np.array([known.get(names[int(index)], {}).get("loss", math.inf) for index in drawn])
        return drawn[np.lexsort((chance[drawn, 1], -losses))[:size]]

    def _by_score(self, names: Sequence[str], size: int, known: Known, chance: Floats) -> NDArray[np.intp]:
        scores = np.array([known.get(name, {}).get("score", -math.inf) for name in names])
        best = np.lexsort((chance[:, 0], -scores))
        best = best[np.isfinite(scores[best])][: size - math.ceil(self.explore * size)]
        rest = np.setdiff1d(np.arange(len(names)), best)
        old = [known.get(names[int(index)], {}).get("asked", 0) > 0 for index in rest]
        return np.concatenate([best, rest[np.lexsort((chance[rest, 1], np.array(old)))][: size - len(best)]])

    def after(self, known: Known, round: int, updates: Updates, scores: Floats | None) -> dict[str, dict[str, float]]:
        """Return what is known of clients after a round; JSON, as a checkpoint holds it."""
        found = {name: dict(facts) for name, facts in known.items()}
        for failure in updates.failures:
            found.setdefault(failure.client, {})["asked"] = round
        for row, name in enumerate(updates.clients):
            facts = {"asked": round, "samples": float(updates.samples[row]), "loss": float(updates.losses[row])}
            if scores is not None:
                facts["score"] = float(scores[row])
            found[name] = {key: value for key, value in facts.items() if math.isfinite(value)}
        return found


def read_trace(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Read a CSV of client, from, to: by client the stretches of time in which it is there."""
    header, rows = read_csv(path, f"path: {path}")
    if header != _COLUMNS:
        raise UserError(f"path: {path} has the columns {', '.join(header) or 'none'}; allowed: client, from, to")
    found: dict[str, list[tuple[float, float]]] = {}
    for number, row in rows:
        client, *times = row.values()
        try:
            begin, end = map(float, times)
        except ValueError:
            raise UserError(
                f"path: {path}, line {number} is {', '.join(row.values())}; allowed: a client and two numbers"
            ) from None
        found.setdefault(client, []).append((begin, end))
    return found


Share = Annotated[float, Field(gt=0, le=1)]
SMALL_FEDERATION = 50
"""Up to so many clients all take part in each round, unless a share is given."""
SMALL_COHORT = 10
"""Of more, a tenth takes part, but never fewer than so many."""


Leads = Literal["accuracy", "balanced-accuracy", "roc-auc", "average-precision", "f1-score", "r2"]


class RoundSettings(Section):
    """[rounds]: how many rounds, how many clients in each, when to evaluate and when to stop."""

    count: int = Field(default=50, ge=1, le=10_000_000)
    """Number of rounds."""
    fraction: Share | None = None
    """Share of the clients that train in each round, at least one client. Not given: all of up to 50 clients, and a
    tenth of more, but at least 10; the run's folder names the share that this came to."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """fixed: each round has as many clients; poisson: each client takes part with probability `fraction`, by itself."""
    select: SelectSettings = SelectSettings()
    """Who is asked in each round, where not everybody alike."""
    withdrawn: tuple[str, ...] = ()
    """Clients that have withdrawn, by name: they are neither asked nor tested; `steelyard withdraw` fills it in."""
    min_clients: int = Field(default=1, ge=0)
    """The run stops (and can be resumed) when fewer clients than this give a usable update; 0 never stops it."""
    evaluate_every: int = Field(default=1, ge=1)
    """Test the model on every client's test set each k rounds; the last round is always tested."""
    target: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Local accuracy that counts as reached, for "rounds to target" and the early stop."""
    share: Share = 0.5
    """Share of the devices that must reach the target."""
    targets: tuple[Share, ...] = ()
    """Targets of the rounds-to-target table; default: `target` alone."""
    shares: tuple[Share, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares of devices of the rounds-to-target table."""
    reach: Literal["at-least", "above"] = "at-least"
    """When a device has reached a target: at-least: a local accuracy of the target or more (the papers' words); above:
    more than the target (what the authors' programme counts)."""
    measure: Leads | None = None
    """The measure that leads: clients are scored by it and rules compared by it, and all others are recorded beside it;
    not given: accuracy, minus RMSE, or what else the task's own is, and no others."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """With a measure: above this probability the positive one of two classes is predicted: the second one, or a table's
    `data.positive`."""
    last: int = Field(default=5, ge=1)
    """Verdicts also look at the mean of the last so many evaluated rounds, which chance moves less than one round."""
    stop_at_target: bool = False
    """End the run once `share` of the devices reach `target`."""
    samples: bool = False
    """Also record right or wrong for every single test sample in the last round."""
    keep: Literal["last", "best"] | None = None
    """Which round's model is the run's own. last (default); best: that of the best tested round, kept in checkpoints
    beside the last. Rows that do not report choose it: the server's (all, or the half that weighs with server_report =
    "apart"), else those of about half of the clients, by their names."""
    patience: int | None = Field(default=None, ge=1)
    """End the run once so many rounds bring nothing better, on the rows by which `keep` chooses."""

    @model_validator(mode="after")
    def _selected(self) -> Self:
        if self.sampling == "poisson" and self.select.by != "uniform":
            raise ValueError(
                f"select.by: got '{self.select.by}' with sampling = 'poisson', where each client comes by itself; "
                "allowed: uniform, or sampling = 'fixed'"
            )
        return self

    def share_of(self, clients: int) -> float:
        """Return the share of so many clients that trains in each round: the one given, or else the default's."""
        return default_fraction(clients) if self.fraction is None else self.fraction

    def cohort(self, clients: int) -> int:
        """Return how many of so many clients train in a round of a fixed size."""
        return cohort_size(clients, self.share_of(clients), self.min_clients)

    @property
    def chooses(self) -> bool:
        """Whether rows choose a round: the best one, or the last one."""
        return self.keep == "best" or self.patience is not None

    @property
    def leading(self) -> Leading | None:
        """The measure that leads, where one is given."""
        return None if self.measure is None else Leading(self.measure.replace("-", "_"), self.threshold)

    @property
    def above(self) -> bool:
        """Whether only more than a target counts."""
        return self.reach == "above"

    @property
    def all_targets(self) -> tuple[float, ...]:
        """The targets of the table."""
        return self.targets or (self.target,)


def default_fraction(clients: int) -> float:
    """Return the share of the clients that train where none is given: a cohort of one would weigh nothing."""
    return 1.0 if clients <= SMALL_FEDERATION else max(0.1, SMALL_COHORT / clients)


def cohort_size(clients: int, fraction: float, least: int) -> int:
    """Return how many of the clients train in a round: the fraction, rounded, at least one and at least `least`."""
    return min(clients, max(1, least, math.floor(fraction * clients + 0.5)))


def devices_needed(share: float, devices: int) -> int:
    """Return ceil(share · n), the number of devices that must reach a target."""
    # 0.07 · 100 is 7.000000000000001 in binary: without the slack, ceil would ask for an eighth device.
    return math.ceil(share * devices - 1e-9)


def reached(scores: Floats, target: float, share: float, *, above: bool = False) -> NDArray[np.bool_]:
    """Say for each row of scores[..., devices] whether ceil(share · n) devices have a score of at least the target.

    Use it for the early stop and for rounds-to-target tables alike; without devices nothing is reached. `above` asks
    for more than the target, as the programme of the authors of papers 000 and 004 does.
    """
    # Of no devices at least one is asked for.
    return at_target(scores, target, above=above) >= max(1, devices_needed(share, scores.shape[-1]))


def at_target(scores: Floats, target: float, *, above: bool = False) -> NDArray[np.int64]:
    """Count for each row of scores[..., devices] the devices with a score of at least the target."""
    return np.asarray((scores > target if above else scores >= target).sum(axis=-1))


Measure = Literal["loss", "accuracy", "local-loss", "local-accuracy"]
Method = Literal["shapley", "leave-one-out", "classes"]
AGREEMENT = "agreement"
"""What the method "classes" measures, whatever else is asked for: a cosine, no loss."""


class ContributionSettings(Section):
    """[contributions]: have every round say what each client added; without the section it is not measured."""

    measure: Measure = "loss"
    """loss, accuracy: on the server's rows, those that only report where there are some; local-loss, local-accuracy: on
    all clients' test rows."""
    method: Method = "shapley"
    """shapley: the mean over all orders in which clients could come, exact up to 12 in a cohort; leave-one-out: the
    model with all against the model without one; classes: agreement by class in the last layer (ShapFed)."""

    @property
    def on_clients(self) -> bool:
        """Whether clients' own test rows are measured on."""
        return self.measure.startswith("local-") and self.method != "classes"


@dataclass(frozen=True, eq=False)
class RoundValues:
    """What each client of a cohort added in one round, by one measure and one method; more is better."""

    measure: str
    method: str
    clients: tuple[str, ...]
    values: Floats
    """[clients, 1 + groups]: over all test rows, then over each group of them."""
    error: Floats
    """[clients]: standard error from drawing coalitions; 0 where all of them were tested."""
    sizes: Counts
    """[groups]: how many test rows a group has."""
    before: float
    """The measure of the model that the cohort received."""
    after: float
    """The measure of the model that the round ended with."""
