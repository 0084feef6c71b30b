"""Readers under fire: whatever a file or a message holds, only our own errors come out, quickly and in little memory.

A few cases of each target run always; `-m slow` runs ten thousand of each. Nothing is ever unpickled: a pickle that is
read would write a file, and none may appear.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import pickle
import resource
import sqlite3
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save

from steelyard.base.errors import UserError
from steelyard.base.settings import parse
from steelyard.clients.flower import tasks, wire
from steelyard.clients.flower.roster import introduction
from steelyard.clients.flower.wire import Form, Refused
from steelyard.data import DataSettings
from steelyard.data.sources.bundled import read_idx
from steelyard.experiment.loading import build
from steelyard.messages.updates import Question, Task
from steelyard.recommend import interactions
from steelyard.recommend.wire import SparseCodec
from steelyard.runs.checkpoint import read_tensors, restore
from steelyard.runs.facts import checksum
from steelyard.runs.schema import SCHEMA
from steelyard.weighing import table as weighing_table

SECONDS = 1.0
MEGABYTES = 512
FEW, MANY = 30, 10_000


class Evil:
    """A pickle of this would leave a file behind when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch unpickled",))


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Return a good file with bytes changed, cut off, repeated or put in; or bytes of any kind."""

    def change_it(edits: list[tuple[str, int, bytes]]) -> bytes:
        content = whole
        for kind, at, new in edits:
            at %= len(content) + 1
            if kind == "put":
                content = content[:at] + new + content[at:]
            elif kind == "over":
                content = content[:at] + new + content[at + len(new) :]
            elif kind == "cut":
                content = content[:at]
            else:
                content = content[:at] + content[at // 2 : at] + content[at:]
        return content

    odd = st.sampled_from(
        [b"\0", b"\xff", b"\n", b"\t", b",", b'"', b"nan", b"inf", b"-1", b"1e400", b"9" * 5000, b"::"]
    )
    edit = st.tuples(
        st.sampled_from(["put", "over", "cut", "twice"]),
        st.integers(0, max(1, 2 * len(whole))),
        st.one_of(odd, st.binary(min_size=1, max_size=8)),
    )
    return st.one_of(st.lists(edit, min_size=1, max_size=4).map(change_it), st.binary(max_size=300))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=12),
        st.sampled_from(["DS", "iid", "cnn", "auto", "npz", "DS>LD", "9" * 4500, "[/b]", "\x1b", "a\0b", "client-001"]),
        st.integers(10**17, 10**400),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
FIELDS = [
    *("seed", "name", "kind", "rounds.count", "rounds.targets", "weighing.criteria", "weighing.priority", "beside.x"),
    *("weighing.capacity", "weighing.weights", "weighing.quantifier", "weighing.score", "weighing.adjust", "flaws"),
    *("data.source", "data.path", "data.levels", "partition.clients", "partition.table", "model.name", "model.hidden"),
    *("training.batch_size", "training.loss", "compute.engine", "store.folder", "interactions.columns", "fpl.triples"),
    *("knowledge.sources", "knowledge.blocked", "weighing", "data", "partition", "rounds", "beside"),
]


def _read_config(content: Any, folder: Path) -> None:
    text, changes, kind = content
    document = parse(text.decode("utf-8", "replace"), "fuzz.toml") if text is not None else {}
    if text is None and kind == "recommend":
        document = {"kind": "recommend", "interactions": {"path": "x"}}
    for name, value in changes:
        where = document
        *sections, last = name.split(".")
        for section in sections:
            inner = where.setdefault(section, {})
            if not isinstance(inner, dict):
                break
            where = inner
        where[last] = value
    build(document)


def _laid(name: str, content: bytes, folder: Path) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _reads(name: str, reader: Callable[[Path], object]) -> Callable[[bytes, Path], None]:
    def read(content: bytes, folder: Path) -> None:
        reader(_laid(name, content, folder))

    return read


def _read_settings(**fields: Any) -> Callable[[Path], object]:
    return lambda path: DataSettings(path=path, **fields).read()


def _read_leaf(content: bytes, folder: Path) -> None:
    _laid("leaf/train/a.json", content, folder)
    _laid("leaf/test/a.json", _LEAF, folder)
    DataSettings(source="leaf", path=folder / "leaf").read()


_TASK = Task("DS", 1, 1, ("a", "b"), torch.zeros(6))
_QUESTION = Question("DS", 1, 1, torch.zeros(2, 6))
_EXPECTED = tasks.Expected({"DS": lambda value: None})
_SPARSE = SparseCodec(0.1, 3, 8)
MESSAGES: dict[str, Callable[[Any], object]] = {
    "updates": lambda records: tasks.read_updates(records, _TASK, _TASK.clients, _EXPECTED),
    "sparse": lambda records: tasks.read_updates(records, _TASK, _TASK.clients, _EXPECTED, _SPARSE),
    "evaluations": lambda records: tasks.read_evaluations(records, _QUESTION, _TASK.clients, (0.0, 1.0)),
    "task": tasks.read_task,
    "question": tasks.read_question,
    "introduction": introduction,
}
"""How messages of each kind are read."""


def _reads_messages(kind: str) -> Callable[[Any, Path], None]:
    def read(content: Any, folder: Path) -> None:
        form, arrays = content
        MESSAGES[kind](wire.content(cast("Form", _Raw(form)), arrays))

    return read


def _read_states(content: str, folder: Path) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    path = folder / "checkpoints" / "round-000001.safetensors"
    path.write_bytes(_MODELS)
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    row = (1, path.name, content, len(_MODELS), checksum(_MODELS, content))
    try:
        database.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, '')", row)
        restore(database, folder)
    finally:
        database.close()


class _Raw:
    """A form that is written as the bytes of the fuzzer, whatever they are."""

    def __init__(self, text: str) -> None:
        self.text = text

    def write(self) -> str:
        return self.text


def _npz_file() -> bytes:
    packed = io.BytesIO()
    np.savez(packed, x=np.arange(24.0).reshape(8, 3), y=np.arange(8) % 2, owner=np.array(["a", "b"] * 4))
    return packed.getvalue()


_LEAF = json.dumps(
    {
        "users": ["a", "b"],
        "num_samples": [2, 2],
        "user_data": {name: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]} for name in "ab"},
    }
).encode()
_CSV = b"a,b,target,own\n1.5,2,0,x\n2.5,,1,y\n3,1,0,x\n,4,1,y\n"
_IDX = struct.pack(">IIII", 2051, 3, 2, 2) + bytes(range(12))
_RATINGS = b"user\titem\trating\ttime\nu1\ti1\t3\t10\nu1\ti2\t4\t11\nu2\ti1\t5\t12\n"
_DAT = b"1::2::3::978300760\n1::3::4::978302109\n"
_CLIENTS = b"client,DS,LD\nA,.9,.2\nB,.1,.8\n"
_PICKLE = pickle.dumps(Evil())
_MODELS = save({"models/DS": torch.zeros(4)})
_ROUND: dict[str, Any] = {"federation": "DS", "round": 1}
_ANSWER: dict[str, Any] = {**_ROUND, "clients": ["a", "b"], "samples": [3, 4], "failures": []}
_ASKED: dict[str, Any] = {**_ROUND, "run": "r", "seed": 1, "seconds": 5.0, "experiment": "{}"}
_FORMS: dict[str, dict[str, Any]] = {
    "updates": {**_ANSWER, "criteria": {"DS": [3.0, 4.0]}, "losses": [0.1, 0.2], "payload": "dense"},
    "evaluations": {
        **_ANSWER,
        "metrics": {"f1": [0.5, 0.5]},
        "scores": [[0.5, 0.5], [0.5, 0.5]],
        "losses": [[0.1, 0.2], [0.1, 0.2]],
    },
    "task": {**_ASKED, "clients": ["a"], "loss": {"name": "auto"}},
    "question": {**_ASKED, "candidates": 2, "detailed": False},
    "introduction": {"version": "1", "clients": ["a", "b"], "about": {"inputs": [3], "classes": 2}},
}
_FORMS["sparse"] = {**_FORMS["updates"], "payload": "sparse"}
_STATES = {
    "DS": {
        "round": 1,
        "finished": False,
        "memory": {},
        "loss": {"name": "auto", "class_weights": [1.0, 2.0], "shape": None, "scale": None},
        "orders": {"order": [0, 1], "reference": 0.5, "testing_rounds": 0, "memory": {}},
    }
}
_ARRAYS = [
    *(np.zeros((2, 6), np.float32), np.zeros(3), np.full((2, 6), np.nan, np.float32), np.zeros((0, 6))),
    *(np.zeros(6, np.float32), np.array([0, 1], np.int32), np.array([1, 0], np.int32), np.array([-1, 9], np.int32)),
    *(np.zeros((2, 3), np.float32), np.zeros((2, 0), np.float32), np.array(["a"]), np.zeros(7, np.bool_)),
]


def _changed(document: dict[str, Any]) -> st.SearchStrategy[str]:
    """Return a good JSON text with any of its values replaced, its bytes damaged, or anything else."""

    def replaced(change: tuple[tuple[str, ...], Any]) -> str:
        path, value = change
        whole = json.loads(json.dumps(document))
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return json.dumps(whole)

    paths = [(name,) for name in document]
    paths += [(name, key) for name, value in document.items() if isinstance(value, dict) for key in value]
    paths += [("DS", name, key) for name, value in document.get("DS", {}).items() if name in _PARTS for key in value]
    return st.one_of(
        st.tuples(st.sampled_from(paths), VALUES).map(replaced),
        damaged(json.dumps(document).encode()).map(lambda content: content.decode("utf-8", "replace")),
        VALUES.map(lambda value: json.dumps(value, default=str)),
        st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, ""]),
    )


_PARTS = ("loss", "orders")


def _message(kind: str) -> st.SearchStrategy[Any]:
    """Return a message of one kind: its form as text, and the arrays beside it."""
    names = {"updates": ["models"], "sparse": ["owners", "rows", "values"], "task": ["parameters"]}
    names |= {"question": ["models"], "evaluations": ["right"], "introduction": ["x"]}
    array = st.sampled_from(_ARRAYS)
    right: dict[str, Any] = dict.fromkeys(names[kind], array) if kind not in ("evaluations", "introduction") else {}
    any_arrays = st.dictionaries(st.sampled_from([*names[kind], "x", ""]), array, max_size=3)
    # The form as it should be, too: otherwise hardly any arrays are looked at.
    form = st.one_of(_changed(_FORMS[kind]), st.just(json.dumps(_FORMS[kind])))
    return st.tuples(form, st.one_of(st.fixed_dictionaries(right), any_arrays))


@dataclass(frozen=True)
class Target:
    """A reader and what it is fed."""

    name: str
    read: Callable[[Any, Path], None]
    inputs: st.SearchStrategy[Any]


TOML = b'name = "t"\nseed = 1\n[rounds]\ncount = 3\n[weighing]\ncriteria = ["DS", "LD"]\npriority = "DS>LD"\n'
TARGETS = [
    Target(
        "config",
        _read_config,
        st.tuples(
            st.one_of(st.none(), damaged(TOML)),
            st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), max_size=3),
            st.sampled_from(["learning", "recommend"]),
        ),
    ),
    Target("idx", _reads("images", lambda path: read_idx(path, axes=3)), st.one_of(damaged(_IDX), st.just(_PICKLE))),
    Target(
        "leaf", _read_leaf, st.one_of(damaged(_LEAF), VALUES.map(lambda v: json.dumps(v).encode()), st.just(_PICKLE))
    ),
    Target(
        "npz",
        _reads("d.npz", _read_settings(source="npz")),
        st.one_of(damaged(_npz_file()), st.just(_PICKLE), st.just(b"PK\x03\x04" + _PICKLE)),
    ),
    *(
        Target(name, _reads(file, reader), st.one_of(*map(damaged, wholes), st.just(_PICKLE)))
        for name, file, reader, wholes in (
            ("csv", "d.csv", _read_settings(source="csv", labels="target", owner="own"), [_CSV]),
            ("clients", "clients.csv", weighing_table.weigh, [_CLIENTS]),
            ("ratings", "ratings.tsv", interactions.read, [_RATINGS, _DAT]),
            ("checkpoint", "round.safetensors", read_tensors, [_MODELS]),
        )
    ),
    Target("states", _read_states, _changed(_STATES)),
    *(Target(kind, _reads_messages(kind), _message(kind)) for kind in MESSAGES),
]


def _seconds(target: Target, content: Any, folder: Path) -> float:
    begun = time.process_time()
    with contextlib.suppress(UserError, Refused):
        target.read(content, folder)
    return time.process_time() - begun


def _fire(target: Target, folder: Path, examples: int) -> None:
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.inputs)
    def check(content: Any) -> None:
        if _seconds(target, content, folder) >= SECONDS:
            # Python may have searched all that Hypothesis keeps for what to free: then a second time is quick.
            gc.collect()
            assert _seconds(target, content, folder) < SECONDS
        assert not Path("unpickled").exists()

    check()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_few_of_each(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _fire(target, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_ten_thousand_of_each(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # What a reader loads once (a library, a table) is no part of a case's time and memory.
    _fire(target, tmp_path, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _fire(target, tmp_path, MANY)
    # In KB on Linux.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10
