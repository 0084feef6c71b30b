"""The table of policies. Importing the built-in ones here registers them: a new one is a file and a name here."""

from __future__ import annotations

from collections.abc import Mapping

from steelyard.weighing.policies import (
    afl,
    cgsv,
    fedawa,
    fedce,
    feddg_ga,
    feddisco,
    fedlaw,
    fedscs,
    nvflare_adaptive,
    q_fedavg,
    shapfed,
    term,
    trust_mad,
)
from steelyard.weighing.policies.policy import Policy, registered

__all__ = [
    "afl",
    "cgsv",
    "fedawa",
    "fedce",
    "feddg_ga",
    "feddisco",
    "fedlaw",
    "fedscs",
    "known",
    "nvflare_adaptive",
    "q_fedavg",
    "shapfed",
    "term",
    "trust_mad",
]


def known() -> Mapping[str, type[Policy]]:
    """Return every policy by name: built in, or declared by installed packages."""
    return registered()
