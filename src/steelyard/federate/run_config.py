"""The run configuration of the Flower app: the experiment as one JSON text, changes to it, and the run's folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from steelyard.base.errors import UserError
from steelyard.base.settings import change
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build

DEFAULTS: dict[str, str | bool] = {"set": "", "out": "", "resume": False, "report": ""}
"""Keys of the run configuration beside `experiment`, with their defaults."""


def experiment_text(experiment: Description) -> str:
    """Return an experiment as the JSON text that travels in the run configuration."""
    return json.dumps(experiment.model_dump(mode="json", exclude_none=True), separators=(",", ":"))


def experiment_of(run_config: Mapping[str, Any]) -> Description:
    """Return the experiment of a run configuration, with the changes of its key `set` applied."""
    return _experiment(str(run_config.get("experiment") or ""), str(run_config.get("set") or ""))


@lru_cache(maxsize=8)
def _experiment(text: str, changes: str) -> Description:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"run config experiment: not JSON ({error}); write it with `steelyard federate init`") from None
    if not isinstance(document, dict):
        raise UserError("run config experiment: not a JSON object; write it with `steelyard federate init`")
    try:
        assignments = shlex.split(changes)
    except ValueError as error:
        raise UserError(f"run config set: {error}; allowed: section.field=value, separated by spaces") from None
    for assignment in assignments:
        change(document, assignment)
    return build(document, "run config experiment")
