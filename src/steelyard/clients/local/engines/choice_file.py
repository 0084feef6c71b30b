"""Which engine was found fastest for a model on this machine: a small file, so that later runs choose the same."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from steelyard.cache import cache_folder
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


def read(name: str) -> str | None:
    """Return the engine kept under this name, or None."""
    found = _load().get(name, {}).get("engine")
    return found if isinstance(found, str) else None


def write(name: str, engine: str, why: str) -> str:
    """Keep a choice and return the one that holds: of two runs that try at the same time, the first decides."""
    try:
        with _locked():
            known = _load()
            if name in known:
                return str(known[name]["engine"])
            known[name] = {"engine": engine, "why": why}
            target = cache_folder() / "engines.json"
            fresh = target.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(known, indent=1, sort_keys=True))
            fresh.replace(target)
    except OSError:
        pass  # nowhere to keep it: the run's own record still says what was chosen
    return engine


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
