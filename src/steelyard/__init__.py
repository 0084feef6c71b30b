"""Steelyard: federated learning that weights clients by measured criteria.

from steelyard import Experiment

result = Experiment.load("quickstart").run()
print(result.history.rounds)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from steelyard.algorithms.registry import algorithm
    from steelyard.api import Experiment, RecommendExperiment, SweepResult, check, resume
    from steelyard.base.errors import UserError
    from steelyard.base.usercode import loss, model
    from steelyard.data import Dataset, Population, in_memory
    from steelyard.messages.algorithm import Algorithm, LocalSteps, LocalTraining, ServerStep
    from steelyard.models.folder import Model
    from steelyard.models.recommender import Recommender
    from steelyard.result import Result
    from steelyard.runs.history import History
    from steelyard.weighing.criterion import CohortView, LocalData, Needs, client_criterion, server_criterion
    from steelyard.weighing.rule import Rule, WeighingSettings
    from steelyard.weighing.table import Weighed, weigh

__all__ = [
    "Algorithm",
    "CohortView",
    "Dataset",
    "Experiment",
    "History",
    "LocalData",
    "LocalSteps",
    "LocalTraining",
    "Model",
    "Needs",
    "Population",
    "RecommendExperiment",
    "Recommender",
    "Result",
    "Rule",
    "ServerStep",
    "SweepResult",
    "UserError",
    "Weighed",
    "WeighingSettings",
    "algorithm",
    "check",
    "client_criterion",
    "in_memory",
    "loss",
    "model",
    "resume",
    "server_criterion",
    "weigh",
]

# Names are imported when first used: `steelyard --help` must not wait for torch.
_HOMES = {
    name: home
    for home, names in {
        "steelyard.messages.algorithm": ("Algorithm", "LocalSteps", "LocalTraining", "ServerStep"),
        "steelyard.algorithms.registry": ("algorithm",),
        "steelyard.api": ("Experiment", "RecommendExperiment", "SweepResult", "check", "resume"),
        "steelyard.data": ("Dataset", "Population", "in_memory"),
        "steelyard.base.errors": ("UserError",),
        "steelyard.models.folder": ("Model",),
        "steelyard.models.recommender": ("Recommender",),
        "steelyard.result": ("Result",),
        "steelyard.runs.history": ("History",),
        "steelyard.base.usercode": ("loss", "model"),
        "steelyard.weighing.criterion": ("CohortView", "LocalData", "Needs", "client_criterion", "server_criterion"),
        "steelyard.weighing.rule": ("Rule", "WeighingSettings"),
        "steelyard.weighing.table": ("Weighed", "weigh"),
    }.items()
    for name in names
}

_DEPRECATED: dict[str, tuple[str, str]] = {}
"""Old names that still work: the new name, and the version in which the old one goes (docs/reference/api.md)."""


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        new, gone_in = _DEPRECATED[name]
        import_module("steelyard.base.errors").deprecated(f"steelyard.{name}", f"steelyard.{new}", gone_in)
        return __getattr__(new)
    if name not in _HOMES:
        raise AttributeError(f"module 'steelyard' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Show the public names, also those that are not loaded yet, and nothing that only this file needs."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
