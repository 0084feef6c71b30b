"""What colluders that know the rule may send: about 200 candidates, all one product of coefficients and directions.

Directions are the honest updates u_i of the cohort, the colluders' own, the spread σ of the honest ones and sign(μ) of
their mean, coordinate by coordinate, a climb of the loss on the colluders' own rows, what the server may learn from
such rows, one random direction that stays the same in all rounds, others drawn anew for each colluder, and the biases
of some classes. With r the median length of the honest updates:

    ipm      −s μ                               C. Xie, O. Koyejo, I. Gupta: "Fall of Empires" (UAI 2019)
    alie     μ − z σ, μ − z σ sign(μ)           G. Baruch, M. Baruch, Y. Goldberg: "A Little Is Enough" (NeurIPS 2019)
    drift    (1 − t) μ + t r d, no longer than r, for a direction d: inside any clip that lets honest updates through
    others   min-max along σ, −μ and −sign(μ)   V. Shejwalkar, A. Houmansadr: "Manipulating the Byzantine" (NDSS 2021)
             −s times their own updates; s μ; nothing; the update of one honest client; random sums of honest updates;
             honest ones by half of the colluders, reversed ones by the others; biases of single classes
    roles    colluders differ, for a payload p of length 1:
             decoys   one or two send huge updates aside, the others s r p and a sliver of these: behind whatever
                      looks for who stands out, s may be as large as they like
             copies   each sends t r p and the way in which another honest client differs, or noise of its own
             off      p without what lies along the first principal directions of honest updates
             rooted   p without what lies along the server's direction, and a share of that direction
             bait     one sends nothing or much, to move the median length, the others r p

The best candidate is then tried longer and shorter. Which one is best, the rule itself says (`rounds.colluding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from steelyard.defence.robust import lengths
from steelyard.messages.payloads import Counts, DenseModels, Floats

IPM = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
ALIE = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
DRIFT = (0.25, 0.5, 0.75, 1.0)
LONGER = (0.5, 0.7, 0.85, 1.2, 1.5, 2.0)
"""By how much the best candidate is made shorter and longer."""


class Directions:
    """The directions that candidates are sums of, [directions, parameters], with their inner products.

    `honest` and `own` are updates [clients, parameters]; `more` are further directions by name.
    """

    def __init__(self, honest: torch.Tensor, own: torch.Tensor, more: Mapping[str, torch.Tensor]) -> None:
        self.clients, self.colluders = len(honest), len(own)
        mean, spread = honest.mean(dim=0), honest.std(dim=0, correction=0)
        made = {"spread": spread, "signed-spread": spread * mean.sign(), "signs": mean.sign(), **more}
        self.rows = torch.cat([honest, own, torch.stack(list(made.values()))])
        self._place = {name: self.clients + self.colluders + at for at, name in enumerate(made)}

    @property
    def names(self) -> Sequence[str]:
        """The directions that are no updates."""
        return list(self._place)

    @cached_property
    def gram(self) -> Floats:
        """Inner products of all directions."""
        return DenseModels(self.rows).gram(torch.zeros_like(self.rows[0]))

    @cached_property
    def median(self) -> float:
        """The median length of the honest updates."""
        return float(np.median(lengths(self.gram)[: self.clients]))

    def only(self, place: int) -> Floats:
        """The coefficients of one direction."""
        return np.eye(len(self.rows))[place]

    def named(self, name: str) -> Floats:
        """The coefficients of a direction that is no update."""
        return self.only(self._place[name])

    @property
    def mean(self) -> Floats:
        """The coefficients of μ."""
        return np.repeat([1.0 / self.clients, 0.0], [self.clients, len(self.rows) - self.clients])

    def length(self, coefficients: Floats) -> float:
        """‖Σ c_k d_k‖."""
        return float(np.sqrt(max(coefficients @ self.gram @ coefficients, 0.0)))

    def unit(self, coefficients: Floats) -> Floats:
        """The coefficients of the same direction with length 1; of nothing, nothing."""
        return coefficients / (self.length(coefficients) or 1.0)

    def widest(self, along: Floats) -> float:
        """Return the greatest γ for which μ + γ p is no further from any honest update than two of them are apart."""
        products = self.gram[: self.clients, : self.clients]
        squares = np.diag(products)
        apart = float((squares[:, None] + squares[None, :] - 2 * products).max())
        away = self.mean[None] - np.eye(len(self.rows))[: self.clients]
        # a γ² + 2 b γ + c = 0 with a = ‖p‖², b = ⟨μ − u_i, p⟩, c = ‖μ − u_i‖² − D² ≤ 0.
        a, b = along @ self.gram @ along, away @ self.gram @ along
        c = np.einsum("ik,kl,il->i", away, self.gram, away) - apart
        return float(((-b + np.sqrt(np.maximum(b * b - a * c, 0.0))) / a).min()) if a > 0 else 0.0


Named = tuple[str, Floats]
"""A candidate: its name and its coefficients, [directions] where all colluders send the same, else one row for each."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidates as models' updates: vectors [vectors, parameters], and which of them each colluder sends."""

    names: tuple[str, ...]
    vectors: torch.Tensor
    sent: Counts
    """[candidates, colluders]: rows of `vectors`."""

    @classmethod
    def of(cls, directions: Directions, named: Sequence[Named]) -> Candidates:
        """Multiply all coefficients with the directions, in one product."""
        sent = np.zeros((len(named), directions.colluders), np.int64)
        rows: list[Floats] = []
        for at, (_, coefficients) in enumerate(named):
            each = np.atleast_2d(coefficients)
            sent[at] = len(rows) + (np.arange(directions.colluders) if len(each) > 1 else 0)
            rows += list(each)
        found = directions.rows.new_tensor(np.stack(rows)) @ directions.rows
        return cls(tuple(name for name, _ in named), found, sent)


def candidates(directions: Directions, family: str, chance: np.random.Generator) -> list[Named]:
    """Return the candidates of a family by name; `chance` draws the random ones."""
    match family:
        case "ipm":
            return list(_reversed_means(directions))
        case "alie":
            return list(_little(directions))
        case "drift":
            return list(_drifting(directions))
        case "roles" | "decoys" | "copies" | "hidden" | "bait":
            # One colluder alone has no roles to share out.
            return list(_roles(directions, chance, family)) or list(_reversed_means(directions))
        case _:
            made = (_reversed_means, _little, _drifting, _widest, _own, _single, _biases)
            fixed = [each for make in made for each in make(directions)]
            return [*fixed, *_drawn(directions, chance), *_roles(directions, chance)]


def around(directions: Directions, best: Named) -> list[Named]:
    """Return the best candidate shorter and longer: as a whole, and in how far it departs from μ."""
    name, found = best
    whole = [(f"{factor:g} · {name}", factor * found) for factor in LONGER]
    return whole + [(f"μ + {s:g} · ({name} − μ)", directions.mean + s * (found - directions.mean)) for s in LONGER]


def _reversed_means(directions: Directions) -> Iterator[Named]:
    for factor in IPM:
        yield f"ipm {factor:g}", -factor * directions.mean


def _little(directions: Directions) -> Iterator[Named]:
    for kind in ("spread", "signed-spread"):
        for factor in ALIE:
            yield f"alie {factor:g} {kind}", directions.mean - factor * directions.named(kind)


def _drifting(directions: Directions) -> Iterator[Named]:
    towards = {"-mean": -directions.mean, "-signs": -directions.named("signs")}
    towards |= {name: directions.named(name) for name in ("climb", "lasting") if name in directions.names}
    for name, along in towards.items():
        for share in DRIFT:
            found = (1 - share) * directions.mean + share * directions.median * directions.unit(along)
            length = directions.length(found)
            shorter = min(1.0, directions.median / length) if length > 0 else 1.0
            yield f"drift {share:g} {name}", shorter * found


def _widest(directions: Directions) -> Iterator[Named]:
    against = {"spread": -directions.named("spread"), "mean": -directions.mean, "signs": -directions.named("signs")}
    for name, along in against.items():
        yield f"min-max {name}", directions.mean + directions.widest(along) * along


def _own(directions: Directions) -> Iterator[Named]:
    mine = np.eye(len(directions.rows))[directions.clients : directions.clients + directions.colluders]
    for factor in (0.5, 1.0, 2.0, 5.0, 10.0):
        yield f"reversed {factor:g}", -factor * mine
    for factor in (5.0, 30.0):
        yield f"boosted {factor:g}", factor * directions.mean
    half = np.arange(directions.colluders)[:, None] % 2
    for factor in (1.0, 3.0):
        yield f"half ipm {factor:g}", np.where(half, directions.mean, -factor * directions.mean)


def _single(directions: Directions) -> Iterator[Named]:
    yield "nothing", 0.0 * directions.mean
    # The honest client farthest from the others is the one whose say all colluders add to (mimic).
    products = directions.gram[: directions.clients, : directions.clients]
    away = np.diag(products) - 2 * products.mean(axis=1)
    for place in np.argsort(-away, kind="stable")[:2].tolist():
        yield f"copy of honest {place}", directions.only(place)
    for name in ("climb", "lasting"):
        for factor in (1.0, 3.0, 10.0) if name in directions.names else ():
            yield f"{name} {factor:g}", factor * directions.median * directions.unit(directions.named(name))


def _biases(directions: Directions) -> Iterator[Named]:
    for name in directions.names:
        if name.startswith("bias"):
            yield name, directions.mean + directions.median * directions.named(name)


def _drawn(directions: Directions, chance: np.random.Generator) -> Iterator[Named]:
    for number in range(8):
        drawn = np.zeros(len(directions.rows))
        drawn[: directions.clients] = chance.standard_normal(directions.clients)
        for factor in (1.0, 3.0):
            yield f"random {number} {factor:g}", factor * directions.median * directions.unit(drawn)


DECOY = 20.0
"""So many times as long as all payloads together a decoy is, so that it alone is the first principal direction."""


def _roles(directions: Directions, chance: np.random.Generator, kind: str = "roles") -> Iterator[Named]:
    payloads = _payloads(directions)
    if kind in ("roles", "decoys"):
        yield from _decoys(directions, payloads)
    if kind in ("roles", "bait"):
        yield from _bait(directions)
    principal = _principal(directions)
    for name, payload in payloads.items():
        if kind in ("roles", "copies"):
            yield from _copies(directions, name, payload, chance)
        if kind in ("roles", "hidden"):
            yield from _hidden(directions, name, payload, principal)


def _payloads(directions: Directions) -> dict[str, Floats]:
    """Return the directions in which colluders with roles push, each of length 1."""
    mean = directions.unit(directions.mean)
    found = {"mean": mean, "-mean": -mean, "-signs": -directions.unit(directions.named("signs"))}
    found |= {
        name: directions.unit(directions.named(name)) for name in ("climb", "lasting") if name in directions.names
    }
    if "lasting" in found:  # agrees with the mean, and leads away from it
        found["mean and lasting"] = directions.unit(mean + 2 * found["lasting"])
    return found


def _aside(directions: Directions) -> list[Floats]:
    """Return random directions of length 1, another for each colluder while there are any."""
    drawn = [directions.unit(directions.named(name)) for name in directions.names if name.startswith("aside")]
    return [drawn[place % len(drawn)] for place in range(directions.colluders)] if drawn else []


def _decoys(directions: Directions, payloads: Mapping[str, Floats]) -> Iterator[Named]:
    aside, count = _aside(directions), directions.colluders
    for decoys in (1, 2):
        if not decoys < count or not aside:
            continue
        for times in (1.0, 3.0, 30.0):
            huge = DECOY * times * directions.median * count * np.stack(aside[:decoys])
            # Where the mean of the whole cohort then lies along the decoys.
            sliver = huge.sum(axis=0) / (directions.clients + decoys)
            for name, payload in payloads.items():
                sent = np.tile(times * directions.median * payload + sliver, (count, 1))
                sent[:decoys] = huge
                yield f"decoy {decoys} {times:g} {name}", sent


def _bait(directions: Directions) -> Iterator[Named]:
    """Yield what moves the median length: some of them short or long, the others a push against the mean."""
    against = -directions.median * directions.unit(directions.mean)
    for baits in sorted({1, directions.colluders // 2, directions.colluders - 1} - {0}):
        for times in (0.0, 0.3, 3.0, 30.0):
            sent = np.tile(against, (directions.colluders, 1))
            sent[:baits] *= times
            yield f"bait {baits} {times:g}", sent


def _copies(directions: Directions, name: str, payload: Floats, chance: np.random.Generator) -> Iterator[Named]:
    r, count = directions.median, directions.colluders
    chosen = np.resize(chance.permutation(directions.clients), count)
    differ = np.eye(len(directions.rows))[chosen] - directions.mean
    differ = np.stack([directions.unit(each) for each in differ])
    noise = _aside(directions)
    for share in (0.25, 0.5, 0.75):
        rest = np.sqrt(1 - share**2)
        yield f"copies {share:g} {name}", r * (share * payload + rest * differ)
        if noise:
            yield f"noisy copies {share:g} {name}", r * (share * payload + rest * np.stack(noise))


def _hidden(directions: Directions, name: str, payload: Floats, principal: Floats) -> Iterator[Named]:
    r = directions.median
    for most in (1, 4):
        along = principal[:most].T @ (principal[:most] @ directions.gram @ payload)
        left = directions.unit(payload - along)
        yield f"off {most} {name}", r * left
        yield f"mean off {most} {name}", 0.5 * directions.mean + 0.7 * r * left
    if "root" in directions.names:
        root = directions.unit(directions.named("root"))
        left = directions.unit(payload - (root @ directions.gram @ payload) * root)
        for share in (0.1, 0.3, 0.6):
            yield f"rooted {share:g} {name}", r * (share * root + np.sqrt(1 - share**2) * left)


def _principal(directions: Directions) -> Floats:
    """Return the directions of length 1 in which honest updates differ most, the first ones first."""
    honest = directions.clients
    centring = np.eye(honest) - 1.0 / honest
    vectors = np.linalg.eigh(centring @ directions.gram[:honest, :honest] @ centring)[1]
    found = np.zeros((honest, len(directions.rows)))
    found[:, :honest] = (centring @ vectors[:, ::-1]).T
    return np.stack([directions.unit(each) for each in found])
