"""FPL in C for the big tables: the package's own draws, start values and steps, some hundred times as fast.

The package simulates FPL with NumPy and no compiler; the thesis' volume (`fpl.epoch = "tables"`, 11 values of π, some
seeds) takes billions of triples. `CompiledFpl` runs them from `fpl_rounds.c`, compiled when first asked for (`cc`), and
tests/benchmarks/test_fpl_compiled.py holds it to `steelyard run` of the same seed, up to the rounding of sums.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import numpy as np

from steelyard.randomness import generator
from steelyard.recommend.fpl import Learning, Schedule, initial_table, initial_vector
from steelyard.recommend.interactions import Codes
from steelyard.recommend.sampling import Histories, user_keys
from steelyard.recommend.sparse import Floats32

SOURCE = Path(__file__).with_name("fpl_rounds.c")
FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-shared", "-fPIC")


class _World(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("users", "items", "triples", "row_bytes")),
        *((name, ctypes.c_void_p) for name in ("starts", "taken", "bits", "triple_keys", "mask_keys")),
        *((name, ctypes.c_void_p) for name in ("table", "vectors", "updates")),
        ("share", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("rate", "user_decay", "positive_decay", "negative_decay")),
    )


@lru_cache(maxsize=8)
def library(factors: int, folder: Path) -> ctypes.CDLL:
    """Compile the C file for so many factors, once per folder, and load it."""
    mark = hashlib.blake2b(SOURCE.read_bytes() + " ".join(FLAGS).encode(), digest_size=6).hexdigest()
    built = folder / f"fpl-{factors}-{mark}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}")
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "cc")
        command = [compiler, *FLAGS, f"-DFACTORS={factors}", str(SOURCE), "-lm", "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True)
        part.replace(built)
    return ctypes.CDLL(str(built))


class CompiledFpl:
    """One run of FPL, epoch by epoch, with the draws of the package's users of the same seed."""

    def __init__(
        self,
        histories: Histories,
        schedule: Schedule,
        learning: Learning,
        *,
        share: float,
        seed: int,
        folder: Path,
        bias_spread: float = 0.0,
        central: bool = False,
    ) -> None:
        """`central`: with the draws of the baseline `bpr-mf`, whose steps are rounds of one user and one triple."""
        self.histories, self.schedule, self.learning, self.seed = histories, schedule, learning, seed
        self.central = central
        self.epochs = 0
        self._library = library(learning.factors, folder)
        width = learning.factors + 1
        stride = -(-width // 8) * 8
        names = histories.names
        self._table = np.zeros((histories.catalogue, stride), dtype=np.float32)
        self._table[:, :width] = initial_table(seed, histories.catalogue, learning.factors, bias_spread=bias_spread)
        self._vectors = np.zeros((histories.users, stride), dtype=np.float32)
        self._vectors[:, : width - 1] = [initial_vector(seed, name, learning.factors) for name in names]
        self._vectors[:, width - 1] = 1.0
        self.updates = np.zeros(histories.catalogue, dtype=np.int64)
        order = np.arange(len(names))
        if not central:
            order = np.array(sorted(order.tolist(), key=names.__getitem__), dtype=np.int64)
        sizes = histories.sizes[order]
        self._cohort = order[(sizes > 0) & (sizes < histories.catalogue)]
        self._kept = (
            histories.starts.astype(np.int64),
            np.ascontiguousarray(histories.items),
            np.ascontiguousarray(histories.bits),
            user_keys(seed, names, "bpr-mf" if central else "triples"),
            user_keys(seed, names, "mask"),
        )
        pointers = [each.ctypes.data for each in (*self._kept, self._table, self._vectors, self.updates)]
        counts = (histories.users, histories.catalogue, schedule.triples, histories.bits.shape[1])
        self._world = _World(*counts, *pointers, share, learning.rate, *learning.decays)

    def epoch(self) -> None:
        """Do one epoch: one-user rounds in sequence, or rounds of everybody."""
        rounds, self.epochs = self.schedule.rounds_per_epoch, self.epochs + 1
        first = ctypes.c_uint64((self.epochs - 1) * rounds + (0 if self.central else 1))
        if self.schedule.users == 1 and self.histories.users > 1:
            purpose = "bpr-mf turns" if self.central else "fpl turns"
            turns = generator(self.seed, self.epochs, "", purpose).integers(len(self._cohort), size=rounds)
            users = np.ascontiguousarray(self._cohort[turns])
            failed = self._library.sequential(ctypes.byref(self._world), _pointer(users), ctypes.c_int64(rounds), first)
        else:
            counts = (ctypes.c_int64(len(self._cohort)), first, ctypes.c_int64(rounds))
            failed = self._library.parallel(ctypes.byref(self._world), _pointer(self._cohort), *counts)
        if failed:
            raise MemoryError("fpl_rounds: no memory")

    @property
    def table(self) -> Floats32:
        """(q_i, b_i) of every item."""
        return self._table[:, : self.learning.factors + 1]

    @property
    def vectors(self) -> Floats32:
        """The vector of every user."""
        return self._vectors[:, : self.learning.factors]

    def scores(self, users: Codes) -> Floats32:
        """Return b_i + q_i·p_u of all items for these users."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.vectors[users] @ self.table[:, :-1].T + self.table[:, -1]


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
