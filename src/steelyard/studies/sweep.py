"""What a sweep is: an experiment over a grid of fields and rules, on a validation split; its points."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, cast

import tomli_w

from steelyard.base import files
from steelyard.base.errors import UserError, brief, listed, nearest, told_as
from steelyard.base.files import SWEEP_FILE as SWEEP_FILE
from steelyard.base.settings import parse, read_value
from steelyard.experiment.description import Description
from steelyard.experiment.loading import FOLDER, build, content_name, keep_code, own_text, rename_code, resolve_code
from steelyard.experiment.parts import PART, Part
from steelyard.experiment.rules import CHECKPOINTS, MOST_SEEDS, with_rules

SHARE = 0.1
"""The share of the training data that settings are chosen on, unless another is given."""
MANY, MOST = 100, 10_000
"""Points from which on a grid is asked about, and beyond which it is a slip of the keyboard."""
LOWER = frozenset({"rounds-to-target", "loss", "rmse", "mae", "mape", "server-mape"})
"""Measures of which less is better."""
_OWN = ("seed", "name", "description", "kind", "store", "tracking", "federate", "beside")
"""Fields and sections that are no settings to be chosen."""

Scalar = str | int | float | bool


@dataclass(frozen=True)
class Axis:
    """One field of the grid, by dotted name, and the values that it takes, in their order."""

    field: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a sweep: the values of its fields, the experiment with its rules, the seeds."""

    folder: str
    values: tuple[Scalar, ...]
    experiment: Description
    seeds: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sweep:
    """A grid over an experiment; use `plan` to make one, `parts` for the runs it is made of."""

    experiment: Description
    """As it would run on the test set, before any value of the grid."""
    axes: tuple[Axis, ...]
    rules: tuple[str, ...]
    """As words; empty for the experiment's main rule."""
    seeds: tuple[int, ...]
    measure: str
    validation: float
    stacked: bool
    """Whether the rules and seeds of one point of the grid are one run."""
    part: Part | None = None
    """The part of the runs that this folder is for; None: all of them."""

    def at(self, values: Sequence[Scalar]) -> Description:
        """Return the experiment at one point of the grid, on the test set, with all rules."""
        fields: dict[str, Any] = {axis.field: value for axis, value in zip(self.axes, values, strict=True)}
        if self.rules:
            return with_rules(self.experiment.changed(fields, where="--over"), self.rules)
        return self.experiment.changed({**fields, "beside": {}}, where="--over")

    @cached_property
    def points(self) -> list[tuple[Scalar, ...]]:
        """The grid in order: the values of the last field change fastest."""
        return list(product(*(axis.values for axis in self.axes)))

    @cached_property
    def parts(self) -> list[PlannedRun]:
        """The runs, in the order in which they are run: one for each point, or one for each rule and seed of it."""
        found: list[tuple[str, tuple[Scalar, ...], Description, tuple[int, ...]]] = []
        for values in self.points:
            described = self.at(values).on_validation(self.validation)
            name = ",".join(
                f"{axis.field.rpartition('.')[2]}={show(v)}" for axis, v in zip(self.axes, values, strict=True)
            )
            if self.stacked:
                found.append((name, values, described, self.seeds))
                continue
            for rule in described.rules():
                one = alone(described, rule)
                found += [(f"{name},{rule},seed={seed}", values, one, (seed,)) for seed in self.seeds]
        digits = len(str(len(found)))
        return [
            PlannedRun(f"{number:0{digits}d}-{_safe(name)}".rstrip("-"), values, described, seeds)
            for number, (name, values, described, seeds) in enumerate(found, 1)
        ]

    @cached_property
    def own(self) -> list[int]:
        """The numbers of the runs, in `parts`, that are done in this folder."""
        numbers = range(len(self.parts))
        return list(numbers) if self.part is None else self.part.share(numbers, "runs")

    def document(self) -> dict[str, Any]:
        """Return the sweep as its file holds it."""
        return {
            "measure": self.measure,
            "validation": self.validation,
            "seeds": list(self.seeds),
            "rules": list(self.rules),
            "stacked": self.stacked,
            **({} if self.part is None else {PART: str(self.part)}),
            "over": [{"field": axis.field, "values": list(axis.values)} for axis in self.axes],
            # So that reading a sweep needs no building of its points, which may run code that they name.
            "runs": [
                {
                    "folder": part.folder,
                    "values": list(part.values),
                    "rules": list(part.experiment.rules()),
                    "seeds": list(part.seeds),
                }
                for part in self.parts
            ],
            "experiment": self.experiment.model_dump(mode="json", exclude_none=True),
        }


def alone(experiment: Description, rule: str) -> Description:
    """Return the experiment with only one of its rules, under the name that it has."""
    return experiment.changed(rules={rule: experiment.rules()[rule]}, where="--rules")


def plan(
    experiment: Description,
    over: Sequence[str] | Mapping[str, Sequence[Scalar]],
    *,
    rules: Sequence[str] = (),
    seeds: int = 1,
    measure: str = "score",
    validation: float | None = None,
    stacked: bool = True,
    many: bool = False,
    part: Part | None = None,
) -> Sweep:
    """Return the sweep of an experiment over fields such as "training.learning_rate=0.05,0.1", every point checked.

    `validation` is the experiment's own, or a tenth, unless given. More than 100 points need `many`.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds: got {seeds}; allowed: a whole number from 1 to {MOST_SEEDS:,}")
    share = validation if validation is not None else experiment.validation or SHARE
    if not 0 < share < 1:
        raise UserError(f"--validation: got {share:g}; allowed: more than 0, less than 1 (share of the training data)")
    if not over and not rules:
        raise UserError("--over: got nothing; allowed: a field and its values, such as training.epochs=1,5, or --rules")
    base = experiment.on_validation(None)
    if "checkpoint_every" not in experiment.store.model_fields_set:
        base = base.changed({"store.checkpoint_every": max(1, experiment.rounds.count // CHECKPOINTS)})
    _check_measure(base, measure)
    axes = read_axes(over, base)
    words = tuple(with_rules(base, rules).rules()) if rules else ()
    count = max(1, len(words))
    for axis in axes:
        count *= len(axis.values)
    if count > MOST or (count > MANY and not many):
        allowed = f"at most {MOST:,}" if count > MOST else f"at most {MANY}, or --yes if you mean it"
        raise UserError(f"--over: a grid of {count:,} points; allowed: {allowed}")
    first = [experiment.seed + number for number in range(seeds)]
    found = Sweep(base, axes, tuple(rules), tuple(first), measure, share, stacked, part)
    _check_points(found)
    _ = found.own
    return found


def measures_of(experiment: Description) -> list[str]:
    """Return the measures by which settings of this experiment can be chosen."""
    local = ["score", *experiment.measures, "worst10", "rounds-to-target", "loss"]
    local += ["accuracy"] if experiment.score_name == "accuracy" else []
    figure = experiment.server_figure
    by_figure = {"rmse": ["server-mape"], "accuracy": ["server-accuracy", "server-macro-f1"]}
    server = by_figure.get(figure, [f"server-{figure.replace('_', '-')}"])
    return [*(local if experiment.clients_evaluate else []), *(server if experiment.reports_on_server else [])]


def _check_measure(experiment: Description, measure: str) -> None:
    known = measures_of(experiment)
    if not known:
        raise UserError(
            "partition.test: got 'none', which leaves nothing to choose by; allowed: local, held-out, or "
            "partition.server_report"
        )
    if measure not in known:
        raise UserError(f"--measure: got {brief(measure)}{nearest(measure, known)}; allowed: {listed(known)}")


def read_axes(over: Sequence[str] | Mapping[str, Sequence[Scalar]], experiment: Description) -> tuple[Axis, ...]:
    """Read fields with values: texts such as "fpl.factors=10,20", or a mapping of names and lists from Python."""
    pairs = list(over.items()) if isinstance(over, Mapping) else [_assignment(text) for text in over]
    axes: list[Axis] = []
    for field, values in pairs:
        _check_field(field, experiment)
        if field in (axis.field for axis in axes):
            raise UserError(f"--over: {field} is given twice; allowed: each field once, with all its values")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UserError(f"--over: {field} got {brief(values)}; allowed: a list of values")
        for value in values:
            if not isinstance(value, Scalar):
                raise UserError(f"--over: {field} got {brief(value)}; allowed: single values, no lists or sections")
        axes.append(Axis(field, tuple(values)))
    return tuple(axes)


def _assignment(text: str) -> tuple[str, list[Scalar]]:
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise UserError(
            f"--over: got {brief(text)}; allowed: section.field=value,value, such as training.learning_rate=0.05,0.1"
        )
    return name.strip(), _values(values)


def _values(text: str) -> list[Scalar]:
    """Read values as TOML would; where they are no TOML, each between commas is plain text or a value."""
    if not all(word.strip() for word in text.split(",")):
        raise UserError(f"--over: got {brief(text)}, in which a value is empty; allowed: a value between all commas")
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except (ValueError, RecursionError):
        return [read_value(word.strip()) for word in text.split(",")]


def _check_field(field: str, experiment: Description) -> None:
    """Refuse fields that are no settings to be chosen, and those that hold more than one value."""
    first = field.partition(".")[0]
    if first in _OWN or field == experiment.validation_field:
        hint = {"seed": " (--seeds gives several)", "beside": " (--rules names rules)"}.get(first, "")
        hint = " (--validation gives the share)" if field == experiment.validation_field else hint
        raise UserError(f"--over: {field} is not a setting that a sweep can choose{hint}; allowed: other fields")
    value: Any = experiment.model_dump(mode="json")
    for key in field.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(cast("list[Any]", value)):
            value = value[int(key)]
        else:
            value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    if isinstance(value, list | dict):
        kind = "a section" if isinstance(value, dict) else "a list"
        raise UserError(f"--over: {field} is {kind}; allowed: fields that hold one value")


def _check_points(sweep: Sweep) -> None:
    """Build every point once, so that nothing is refused after hours; the same experiment twice is a slip."""
    seen: dict[str, str] = {}
    for values in sweep.points:
        described = sweep.at(values)
        where = ", ".join(f"{axis.field}={show(v)}" for axis, v in zip(sweep.axes, values, strict=True))
        for rule, settings in described.rules().items():
            alone = described.model_copy(update={"weighing": settings, "beside": {}})
            text, point = alone.model_dump_json(), f"{where} {rule}".strip()
            if text in seen:
                raise UserError(f"--over: '{point}' is the same experiment as '{seen[text]}'; allowed: each point once")
            seen[text] = point


def show(value: Scalar) -> str:
    """Write a value of the grid as tables and the names of folders show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,-]+", "-", name)[:80]


# The file of a sweep's folder.


@dataclass(frozen=True)
class ListedRun:
    """What a sweep's file says of one of its runs: its folder, the values of its fields, its rules, the seeds."""

    folder: str
    values: tuple[Scalar, ...]
    rules: tuple[str, ...]
    seeds: tuple[int, ...]


def write_sweep(sweep: Sweep, folder: Path) -> None:
    """Make a folder that of a sweep; the code that its experiment names is copied into it."""
    write_plan(folder / SWEEP_FILE, sweep.document())


def write_plan(path: Path, document: dict[str, Any]) -> None:
    """Write what several runs of one folder are made from, once; the code that its experiment names is kept beside."""
    folder = path.parent
    with told_as(f"{folder}: cannot be written", "a writable folder"):
        folder.mkdir(parents=True, exist_ok=True)
        keep_code(document["experiment"], folder / FOLDER)
        files.write(path, tomli_w.dumps(document).encode())


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    return files.is_file(folder / SWEEP_FILE)


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep that a folder holds; none of the code that it names is run."""
    path, document = _read(folder)
    try:
        described = document["experiment"]
        axes = tuple(Axis(str(axis["field"]), _scalars(axis["values"])) for axis in document["over"])
        rules, seeds = tuple(map(str, document["rules"])), tuple(map(int, document["seeds"]))
        measure, share, stacked = str(document["measure"]), float(document["validation"]), bool(document["stacked"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as the sweep wrote it") from None
    experiment = build(described, str(path), reading=True)
    known = measures_of(experiment)
    if measure not in known:
        raise UserError(f"{path}: measure: got {brief(measure)}{nearest(measure, known)}; allowed: {listed(known)}")
    part = Part.read(str(document[PART]), f"{path}: {PART}") if PART in document else None
    return Sweep(experiment, axes, rules, seeds, measure, share, stacked, part)


def read_runs(folder: Path) -> list[ListedRun]:
    """Return the runs of a sweep as its file lists them; unlike its parts, without building their experiments."""
    path, document = _read(folder)
    try:
        fields = len(document["over"])
        return [
            ListedRun(
                _name(run["folder"]),
                _scalars(run["values"], fields),
                tuple(map(str, run["rules"])),
                tuple(map(int, run["seeds"])),
            )
            for run in document["runs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as the sweep wrote it") from None


def _name(value: Any) -> str:
    """Return the name of a run's folder in the sweep's: one that leads elsewhere is no name."""
    if not isinstance(value, str) or value in ("", ".", "..") or any(mark in value for mark in "/\\\0"):
        raise ValueError(f"folder: {brief(value)}")
    return value


def _scalars(values: Any, count: int | None = None) -> tuple[Scalar, ...]:
    """Return the values of a file's list: single ones, and where it is known as many as there are fields."""
    found = cast("list[Any]", values)
    if not isinstance(values, list) or not all(isinstance(each, Scalar) for each in found):
        raise ValueError(f"values: {brief(values)}")
    if len(found) != (len(found) if count is None else count):
        raise ValueError(f"values: {brief(values)} for {count} field{'s' if count != 1 else ''}")
    return tuple(found)


def _read(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / SWEEP_FILE
    if not files.is_file(path):
        raise UserError(f"{folder}: no {SWEEP_FILE} here; allowed: a folder that `steelyard sweep` made")
    return path, read_plan(path)


def read_plan(path: Path) -> dict[str, Any]:
    """Return what several runs of one folder are made from; code that its experiment names is found beside."""
    document = parse(own_text(path), str(path))
    try:
        resolve_code(document["experiment"], path.parent.resolve())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as it was written") from None
    return document


def difference(kept: Sweep, given: Sweep) -> str | None:
    """Return the first field in which a sweep differs from the one that its folder holds; None where they agree."""
    return differing(kept.document(), given.document())


def differing(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the first field in which two such documents differ, with the fields of their experiments by name."""
    before, now = _flat(before), _flat(now)
    return next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in document.items() if name not in ("experiment", "over", "runs")}
    # What is swept by its fields, which say more than the list; the runs follow from it.
    flat |= {f"over {axis['field']}": axis["values"] for axis in document.get("over", ())}
    experiment = deepcopy(document["experiment"])
    # By content: what lies in the folder is run only where it is what was given here.
    rename_code(experiment, content_name)
    for section, fields in experiment.items():
        if isinstance(fields, dict):
            flat |= {f"{section}.{name}": value for name, value in cast("dict[str, Any]", fields).items()}
        else:
            flat[section] = fields
    return flat
