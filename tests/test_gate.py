"""One gate: whatever is handed to a public callable, it works or says in one line, as a UserError, what is wrong."""

from __future__ import annotations

import atexit
import contextlib
import doctest
import functools
import io
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from steelyard.algorithms import registry as algorithms
from steelyard.base.errors import UserError
from steelyard.weighing import criterion

steelyard: Any = import_module("steelyard")
"""As a user has it who checks no types."""
LONG = "a" * 5000


class Odd:
    """Something of no use to anybody, whose text is no help either."""

    def __repr__(self) -> str:
        return "first line\nsecond line"


class Hostile:
    """Something that fails at every question."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no items")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]


def endless() -> Any:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def bad_values() -> list[Any]:
    """Return values anew for each call: some are used up by looking at them."""
    numbers = [0, -1, 1, 2**63, 10**400, 0.5, float("nan"), float("inf"), 1j, Fraction(1, 3)]
    texts = ["", "\0", "\x1b[2J", LONG, "../x", "DS>LD", "a\nb", "9" * 400, b"DS"]
    arrays: list[Any] = [
        *(np.array(3), np.zeros(0), np.zeros((3, 2, 2)), np.array(["a", None], dtype=object), np.array([np.nan, 1])),
        *(np.float32(0.5), np.str_("DS"), torch.zeros(4, 3), pandas.DataFrame(), pandas.DataFrame({"a": [1, 2]})),
    ]
    others: list[Any] = [Path("none"), Path("\0"), Path("."), ..., Exception("x")]
    shapes: list[Any] = [
        *([], [None], [[]], ["DS", "DS"], [LONG], [{}], endless(), ("a", 1), {1, 2}, iter([1])),
        *({}, {"a": 1}, {None: None}, {"a": {"DS": 1}}, {"a": [1, "x"]}),
    ]
    code: list[Any] = [len, object, lambda first, second: 1, Odd, Odd(), Hostile()]
    return [None, True, False, *numbers, *texts, *arrays, *others, *shapes, *code]


def small(**fields: Any) -> Any:
    return steelyard.Experiment(
        **{
            "data": {"source": "memory"},
            "partition": {"clients": 2},
            "model": {"name": "logistic"},
            "rounds": {"count": 1},
            "compute": {"engine": "loop"},
            **fields,
        }
    )


@functools.cache
def nowhere() -> Any:
    """An experiment whose data do not exist."""
    return small(data={"source": "csv", "path": "none.csv", "labels": "y"})


def rows() -> Any:
    chance = np.random.default_rng(1)
    return steelyard.in_memory(chance.normal(size=(24, 3)), np.arange(24) % 2)


FRAME = pandas.DataFrame({"a": [1.0, 2.0], "y": [0, 1], "who": ["p", "q"]})
TABLE = {"ann": {"DS": 1, "LD": 2}, "bob": {"DS": 3, "LD": 1}}

SECTIONS = ("data", "partition", "flaws", "facts", "model", "training", "rounds", "weighing", "beside", "store")
FIELDS: dict[str, Callable[[Any], Any]] = {
    **{
        f"Experiment({name})": lambda bad, name=name: small(**{name: bad})
        for name in (*SECTIONS, "seed", "name", "kind")
    },
    **{
        f"Experiment({section}.{name})": lambda bad, section=section, name=name: small(**{section: {name: bad}})
        for section, name in (
            *(("data", "path"), ("data", "files"), ("data", "levels"), ("model", "name"), ("model", "arguments")),
            *(("training", "loss"), ("rounds", "targets")),
        )
    },
    **{
        f"WeighingSettings({name})": lambda bad, name=name: steelyard.WeighingSettings(**{name: bad})
        for name in steelyard.WeighingSettings.model_fields
    },
    "RecommendExperiment(interactions)": lambda bad: steelyard.RecommendExperiment(interactions=bad),
    "Experiment.load": lambda bad: steelyard.Experiment.load(bad),
    "Experiment.load(changes)": lambda bad: steelyard.Experiment.load("quickstart", bad),
    "resume": lambda bad: steelyard.resume(bad),
    "resume(given)": lambda bad: steelyard.resume("none", given=bad),
}
DATA: dict[str, Callable[[Any], Any]] = {
    "in_memory": lambda bad: steelyard.in_memory(bad),
    "in_memory(labels)": lambda bad: steelyard.in_memory(np.zeros((2, 3)), bad),
    **{
        f"in_memory({name})": lambda bad, name=name: steelyard.in_memory(np.zeros((2, 3)), [0, 1], **{name: bad})
        for name in ("owners", "held_out", "marks", "classes", "name", "task")
    },
    **{
        f"in_memory(frame, {name})": lambda bad, name=name: steelyard.in_memory(FRAME, label="y", **{name: bad})
        for name in ("owner", "held_out", "marks", "normalise", "categories", "ignore", "missing")
    },
}
WEIGHING: dict[str, Callable[[Any], Any]] = {
    "weigh": lambda bad: steelyard.weigh(bad),
    "weigh(rule)": lambda bad: steelyard.weigh(TABLE, bad),
    "weigh(normalise)": lambda bad: steelyard.weigh(TABLE, "DS", bad),
    "weigh(value)": lambda bad: steelyard.weigh({"ann": {"DS": bad}}),
    "Rule": lambda bad: steelyard.Rule(bad),
    "Rule.weigh": lambda bad: steelyard.Rule(steelyard.WeighingSettings()).weigh(bad),
    "Rule.weigh(order)": lambda bad: steelyard.Rule(steelyard.WeighingSettings()).weigh(np.ones((2, 1)), bad),
    "Rule.score": lambda bad: steelyard.Rule(steelyard.WeighingSettings()).score(bad),
}
_numbers = itertools.count()
DECORATORS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{decorator.__name__}({name})": lambda bad, decorator=decorator, name=name: decorator(
            f"G{next(_numbers)}", **{name: bad}
        )(lambda view: 1.0)
        for decorator, names in (
            (steelyard.client_criterion, ("about", "description", "maximum", "needs", "at_most_classes")),
            (steelyard.server_criterion, ("about", "description", "maximum", "needs", "of_one")),
        )
        for name in names
    },
    **{
        f"{decorator.__name__}(name)": lambda bad, decorator=decorator: decorator(bad)
        for decorator in (steelyard.client_criterion, steelyard.server_criterion, steelyard.algorithm)
    },
    **{
        f"@{decorator.__name__}": lambda bad, decorator=decorator: decorator(f"G{next(_numbers)}")(bad)
        for decorator in (steelyard.client_criterion, steelyard.server_criterion)
    },
    **{
        f"Needs({name})": lambda bad, name=name: steelyard.Needs(**{name: bad})
        for name in ("labels", "classes", "marks")
    },
    "@algorithm": lambda bad: steelyard.algorithm("g")(bad),
    "@model": lambda bad: steelyard.model(bad),
    "@loss": lambda bad: steelyard.loss(bad),
}


@functools.cache
def mine() -> Any:
    """A run that has ended, for what is asked of one; nobody writes to it."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return small(data={"source": "digits"}).run(folder / "run")


RESULTS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name} of a run": lambda bad, call=call: call(mine(), bad)
        for name, call in {
            "plot": lambda run, bad: run.plot(bad),
            "plot(rule)": lambda run, bad: run.plot("weights", rule=bad),
            "model": lambda run, bad: run.model(bad),
            "report": lambda run, bad: run.report(bad),
            "changed": lambda run, bad: run.experiment.changed(bad),
            "rounds_after": lambda run, bad: run.history.rounds_after(bad),
            "cohorts": lambda run, bad: run.history.cohorts("DS", 0, bad),
            "spaced": lambda run, bad: run.history.spaced(bad),
            "tested_at": lambda run, bad: run.history.tested_at("DS", 0, bad),
        }.items()
    },
    "Result.table": lambda bad: steelyard.Result(bad).table,
    "SweepResult": lambda bad: steelyard.SweepResult(bad).table,
    "History": lambda bad: steelyard.History(bad),
}

VERBS: dict[str, Callable[[Any], Any]] = {
    "run(dataset)": lambda bad: small().run(dataset=bad),
    "run(out)": lambda bad: nowhere().run(out=bad),
    "run(progress)": lambda bad: nowhere().run(progress=bad),
    "compare(rules)": lambda bad: nowhere().compare(bad),
    "compare(seeds)": lambda bad: nowhere().compare("DS", bad),
    **{
        f"sweep({name})": lambda bad, name=name: nowhere().sweep(**{"over": {"training.epochs": [1]}, name: bad})
        for name in ("over", "rules", "seeds", "measure", "out", "validation", "jobs", "dataset", "progress")
    },
    "sweep(values)": lambda bad: small().sweep({"training.epochs": bad}, dataset=rows()),
    "plot": lambda bad: steelyard.Result("none").plot(bad),
    "report": lambda bad: steelyard.Result("none").report(bad),
}


def held_to_the_gate(name: str, call: Callable[[Any], Any]) -> None:
    faults: list[str] = []
    for number, bad in enumerate(bad_values()):
        try:
            call(bad)
        except UserError as error:
            if "\n" in str(error) or len(str(error)) > 2000 or not str(error).strip():
                faults.append(
                    f"{name} with value {number} ({type(bad).__name__}): no single line: {str(error)[:200]!r}"
                )
        except Exception as error:
            shown = "..." if isinstance(bad, Hostile) else repr(bad)[:60]
            faults.append(f"{name} with {shown} ({type(bad).__name__}): {error!r}")
    assert not faults, "\n".join(faults)


ALL = {**FIELDS, **DATA, **WEIGHING, **DECORATORS, **RESULTS, **VERBS}


@pytest.mark.parametrize("name", ALL)
def test_a_public_callable_works_or_says_what_is_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (criterion._registry, algorithms._registry):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    held_to_the_gate(name, ALL[name])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a sweep, as the examples have them."""
    folder = tmp_path_factory.mktemp("study")
    small().run(folder / "runs" / "mine", dataset=rows())
    over = {"training.epochs": [1, 2]}
    found = small(data={"source": "digits"}).sweep(over, out=folder / "runs" / "my-sweep", progress=False)
    assert found.answer["best"] is not None
    ratings = "".join(f"u{user}\ti{(user * 3 + item) % 12}\t5\t{item}\n" for user in range(8) for item in range(6))
    (folder / "ratings.tsv").write_text("user\titem\trating\ttime\n" + ratings)
    return folder


VERBS_WITH_EXAMPLES = [
    *(steelyard.Experiment.load, steelyard.Experiment.run, steelyard.Experiment.compare, steelyard.Experiment.sweep)
]


@pytest.mark.parametrize("name", [*steelyard.__all__, *(verb.__qualname__ for verb in VERBS_WITH_EXAMPLES)])
def test_a_public_name_has_an_example_that_runs(name: str, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documented = {verb.__qualname__: verb for verb in VERBS_WITH_EXAMPLES}.get(name) or getattr(steelyard, name)
    examples = doctest.DocTestParser().get_examples(documented.__doc__)
    assert examples, f"{name} has no example"
    monkeypatch.chdir(study)
    for registry in (criterion._registry, algorithms._registry):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    load = steelyard.Experiment.load
    quick = ["rounds.count=1", "compute.engine=stacked", "model.name=logistic"]
    # for speed: the same calls, in one round
    monkeypatch.setattr(
        steelyard.Experiment, "load", lambda name, changes=(), **more: load(name, [*changes, *quick], **more)
    )
    numbers = np.random.default_rng(1)
    known: dict[str, Any] = {"steelyard": steelyard, "numpy": np, "torch": torch}
    known |= {"features": numbers.normal(size=(40, 3)), "labels": np.arange(40) % 2}
    if "runs/mine" in documented.__doc__ and "run(" in documented.__doc__:
        monkeypatch.chdir(study / "runs")
        (study / "runs" / "ratings.tsv").write_text((study / "ratings.tsv").read_text())
    for example in examples:
        code = compile(example.source, name, "single")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, known)
        if example.want:
            assert printed.getvalue() == example.want
