"""Which engine was found fastest for a model on this machine: a small file, so that later runs choose the same."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.base.files import cache_folder
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.engines import fingerprint
from steelyard.clients.local.engines.engine import TrainingSetup


def key(setup: TrainingSetup, cohort: Cohort, engines: Sequence[str]) -> str:
    """Return a name for this model, this kind of work, this machine and the engines there are to choose from."""
    cuda = setup.device.type == "cuda"
    facts = {
        "model": fingerprint.of_module(setup.module),
        "features": tuple(cohort.dataset.features.shape[1:]),
        "augment": repr(cohort.dataset.augment),
        "training": setup.training.model_dump(mode="json", exclude={"learning_rate"}),
        "loss": fingerprint.of_loss(cohort.loss.name),
        "clients": _rough(len(cohort)),
        "samples": _rough(int(cohort.sizes.max())),
        "device": torch.cuda.get_device_name(setup.device) if cuda else platform.processor() or platform.machine(),
        "machine": platform.node(),
        "precision": setup.precision,
        "threads": setup.threads,
        "chunk": setup.chunk,
        "torch": torch.__version__,
        "engines": list(engines),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _rough(number: int) -> int:
    """The next power of two: a few clients more or less do not call for another trial."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Choice:
    """An engine as compute.engine takes it, and what every run that takes it should tell of it."""

    engine: str
    notes: tuple[str, ...] = ()


def read(name: str) -> Choice | None:
    """Return what is kept under this name, or None."""
    return _choice(_load().get(name))


def _choice(found: Any) -> Choice | None:
    """What an entry holds; None for an older one, which has no notes."""
    if not isinstance(found, dict) or not isinstance(found.get("engine"), str):
        return None
    return Choice(found["engine"], tuple(map(str, found["notes"]))) if isinstance(found.get("notes"), list) else None


def write(name: str, choice: Choice, why: str) -> Choice:
    """Keep a choice and return the one that holds: of two runs that try at the same time, the first decides."""
    try:
        with _locked():
            known = _load()
            if (first := _choice(known.get(name))) is not None:
                return first
            known[name] = {"engine": choice.engine, "why": why, "notes": list(choice.notes)}
            target = cache_folder() / "engines.json"
            fresh = target.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(known, indent=1, sort_keys=True))
            fresh.replace(target)
    except OSError:
        pass  # nowhere to keep it: the run's own record still says what was chosen
    return choice


def _load() -> dict[str, Any]:
    try:
        known = json.loads((cache_folder() / "engines.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


@contextmanager
def _locked() -> Generator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / "engines.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
