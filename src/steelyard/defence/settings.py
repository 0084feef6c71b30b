"""[weighing.defence]: the section that names a robust rule, which stands between the weights and the new model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from steelyard.base.errors import UserError, listed
from steelyard.base.settings import Section

DefenceName = Literal[
    "clip",
    "median",
    "trimmed-mean",
    "multi-krum",
    "geometric-median",
    "fltrust",
    "spectral",
    "none",
]
DEFENCES: tuple[str, ...] = get_args(DefenceName)
BY_COORDINATE: frozenset[str] = frozenset({"median", "trimmed-mean"})
"""Rules that look at each parameter by itself; all others need only the inner products of the updates."""
REMOVED = {"flame": "spectral", "centred-clip": "clip or spectral"}
"""Rules that were there until 0.2, and what to use in their place."""

# Which parameter belongs to which rules: one given for another rule is a mistake that must not pass in silence.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "hostile": ("trimmed-mean", "multi-krum", "spectral"),
    "radius": ("clip",),
    "quantile": ("clip",),
    "smooth": ("clip",),
    "steps": ("geometric-median",),
    "least_distance": ("geometric-median",),
}


class DefenceSettings(Section):
    """[weighing.defence]: how the weighted updates are combined when some clients may be hostile.

    Every rule takes the weights that the criteria gave; with equal weights each is its paper's.
    """

    rule: DefenceName = "clip"
    """clip: no update longer than a radius; median, trimmed-mean: coordinate by coordinate; multi-krum: only the
    clients nearest to each other; geometric-median: the point with the least sum of distances; fltrust: as far as an
    update points where the server's own does; spectral: without those who stand out where the updates differ most;
    none: the plain sum."""
    mix: bool = False
    """First replace every update by the mean of its nearest ones, n less the hostile: helps where clients differ."""
    hostile: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """trimmed-mean, multi-krum, spectral, mix: the share of a cohort that may be hostile. Default 0.3."""
    radius: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """clip: the radius itself; default: it adapts, see `quantile`."""
    quantile: Annotated[float, Field(gt=0, le=1)] | None = None
    """clip: the radius is this quantile of the cohort's lengths, in each round anew. Default 0.5."""
    smooth: Annotated[float, Field(ge=0, lt=1)] | None = None
    """clip: how much of last round's radius stays, s: r_t = q^(1−s) · r_(t−1)^s. Default 0."""
    steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """geometric-median: number of steps. Default 8."""
    least_distance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """geometric-median: smoothing ν: nearer than this counts as this far. Default 1e-6."""

    @model_validator(mode="before")
    @classmethod
    def _still_here(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if (rule := value.get("rule")) in REMOVED:
                raise UserError(f"rule: '{rule}' was removed after 0.2. Use {REMOVED[rule]}.")
            if "buckets" in value:
                raise UserError("buckets: was removed after 0.2. Use mix = true.")
        return value

    @model_validator(mode="after")
    def _fits(self) -> DefenceSettings:
        for name, allowed in _PARAMETERS.items():
            if getattr(self, name) is None or self.rule in allowed or (name == "hostile" and self.mix):
                continue
            more = " or mix = true" if name == "hostile" else ""
            raise UserError(f"{name}: given with rule = '{self.rule}'; allowed only with {listed(allowed)}{more}")
        if self.radius is not None and (self.quantile is not None or self.smooth is not None):
            raise UserError(
                "radius: given together with quantile or smooth; allowed: a fixed radius, or quantile and smooth"
            )
        return self

    @property
    def robust(self) -> bool:
        """Whether anything but the plain weighted sum is made of the updates."""
        return self.rule != "none" or self.mix

    @property
    def share(self) -> float:
        """The share of a cohort that may be hostile, with its default."""
        return 0.3 if self.hostile is None else self.hostile

    @property
    def needs_root(self) -> bool:
        """Whether the server must train on rows of its own."""
        return self.rule == "fltrust"
