"""A first experiment for somebody's data, as a commented TOML file that runs as it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.base.errors import UserError, first_names, without_controls
from steelyard.base.measures import LEAST_ROWS
from steelyard.base.settings import parse
from steelyard.data.inspect import DataSummary, shown
from steelyard.experiment.loading import build, resolve_paths
from steelyard.rounds.plan import default_fraction

ENOUGH_FOR_SERVER = 400
"""From so many rows on the server can keep some, on which it weighs clients."""
MANY_ROWS = 20_000
FEW_OWNER_ROWS = 10
FEWEST_ROWS = 10
"""With fewer there is nothing to share out among two clients, each of which trains and tests."""
SMALL_SIDE = 16
"""Images with sides below this many pixels need no convolutions."""
RARE = 0.4
"""A class is rare that has less than this part of an equal share: of two classes under 20 % of the rows."""
ENOUGH_RARE = 5
"""With so many test rows of the rare class at a usual client, ranks of scores are told better than classes."""
LINE = 120
STEPS = 10
"""Steps that a client should take in a round, or its update says little."""


Fields = dict[str, tuple[Any, str]]
"""One section of the file: its fields with their comments."""
ABOVE = {
    "weighing": "What a client's say depends on: the first criterion counts most.",
    "beside.fedavg": "Further rules, to compare with.",
}
"""Comments above a section."""


def propose(summary: DataSummary, paths: Sequence[Path], file: Path) -> tuple[str, str]:
    """Return the text of an experiment for data at `paths`, to be written as `file`, and one line that sums it up.

    What it proposes was checked as any experiment is; sizes follow from the rows that a client has.
    """
    partition, clients, each = _partition(summary)
    model = _model(summary)
    training = _training(summary, str(model["name"][0]), each)
    rounds = _rounds(summary, clients)
    weighing, rule = _weighing(summary, partition)
    placed: list[str] = [_relative(path, file) for path in paths]
    where: Fields = {"source": (summary.source, "")}
    where["files" if len(paths) > 1 else "path"] = (placed if len(paths) > 1 else placed[0], "relative to this file")
    sections: dict[str, Fields] = {
        "data": {**where, **summary.fields},
        "partition": partition,
        "model": model,
        "training": training,
        "rounds": rounds,
        "weighing": weighing,
        "beside.fedavg": {"criteria": (["DS"], "a client's say is its size")},
        "beside.equal": {"criteria": (["EQ"], "everybody alike")},
    }
    text = _text(_name(file), sections, summary, first_names([path.name for path in paths], 3))
    document = parse(text, str(file))
    resolve_paths(document, file.parent)
    build(document, str(file))
    name, count = model["name"][0], rounds["count"][0]
    return text, f"{name} on {clients:,} clients, {count} rounds; {rule} beside fedavg and equal"


def check_target(file: Path, *, force: bool = False) -> None:
    """Refuse a file that cannot be written or must not be; call it before looking at data, which may take long."""
    if file.is_dir():
        raise UserError(f"new: '{file}' is a folder; allowed: the name of a file, such as my.toml")
    if file.exists() and not force:
        raise UserError(f"new: '{file}' is there already; allowed: another name, or --force to write over it")
    if not file.parent.is_dir():
        raise UserError(f"new: found no folder '{file.parent}'; allowed: a file in a folder that exists")


def write(file: Path, text: str, *, force: bool) -> None:
    """Write a new experiment; one that is there already stays unless `force` is given."""
    check_target(file, force=force)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UserError(f"new: '{file}' cannot be written ({problem.strerror or problem})") from None


def _partition(summary: DataSummary) -> tuple[Fields, int, float]:
    """Return the section, how many clients it makes, and how many rows a usual one trains on."""
    section: Fields = {}
    trained = summary.rows - summary.held_out
    if trained < FEWEST_ROWS:
        raise UserError(f"new: the data have {trained} rows to train on; allowed: at least {FEWEST_ROWS}")
    if summary.owners is not None:
        sizes = np.array(list(summary.owners.values()))
        large = sizes >= FEW_OWNER_ROWS
        minimum = FEW_OWNER_ROWS if large.sum() >= 2 and sizes[large].sum() >= 0.8 * sizes.sum() else 2
        kept = sizes[sizes >= minimum]
        if len(kept) < 2:
            raise UserError(
                f"--owner: {len(kept)} of {len(sizes)} owners have two rows or more; allowed: at least two such owners"
            )
        scheme = "given" if summary.owners_held_out else "natural"
        section["scheme"] = (scheme, "one client for each owner")
        section["minimum"] = (minimum, "owners with fewer rows are left out")
        clients, each, trained = len(kept), float(np.median(kept)), min(trained, int(kept.sum()))
    else:
        clients = 50 if trained >= MANY_ROWS else int(np.clip(trained // 50, 2, 10))
        each = trained / clients
        if summary.classes and each >= 10 * len(summary.classes):
            section["scheme"] = ("dirichlet", "no owners are known: clients with unequal shares of the classes")
            section["alpha"] = (1.0, "smaller: more unequal")
            section["minimum"] = (max(4, int(each / 5)), "least rows of a client")
        else:
            section["scheme"] = ("iid", "no owners are known: rows at random")
            section["size_spread"] = (0.5, "how unequal in size clients are; 0: alike")
            section["minimum"] = (max(2, int(each / 5)), "least rows of a client")
        section["clients"] = (clients, "")
    own_tests = summary.held_out > 0 and (summary.owners is None or summary.owners_held_out)
    if own_tests:
        section["test"] = ("held-out", "clients test on rows of the source's own test part")
    else:
        section["test"] = ("local", "each client tests on rows of its own, which it never trains on")
        section["test_fraction"] = (0.2, "")
        each *= 0.8
    if trained >= ENOUGH_FOR_SERVER:
        section["server"] = (
            "fraction",
            "rows that the server keeps, to weigh clients by what their models can do",
        )
        # Half of them report: enough to compare rules on, where a tenth of few rows would not be.
        share = max(0.1, ceil(100 * (2 * LEAST_ROWS + 2) / trained) / 100)
        section["server_fraction"] = (share, "")
        few = summary.owners is not None and len(summary.owners) <= 20
        if few or summary.classes:
            section["server_balance"] = ("owners" if few else "classes", "as many of each")
        section["server_report"] = ("apart", "half of them weigh, the other half only report")
        each *= 1 - share
    return section, clients, each


def _model(summary: DataSummary) -> Fields:
    if summary.task == "regression":
        return {"name": ("linear", "linear regression; mlp learns curves, but wants a target of about unit size")}
    if summary.task == "survival":
        return {"name": ("linear", "Cox's proportional hazards; mlp learns curves")}
    if summary.task == "segmentation":
        return {"name": ("unet", 'a small U-Net; training.loss = "dice" where most is background')}
    images = len(summary.shape) > 1
    if images and min(summary.shape[-2:]) >= SMALL_SIDE:
        return {"name": ("cnn", "two convolutions and two dense layers; `steelyard list models` shows others")}
    if images:
        return {
            "name": ("mlp", "dense layers, enough for images this small; cnn for larger"),
            "hidden": ([64], "units"),
        }
    if summary.rows < 2000:
        return {"name": ("logistic", "safe with few rows; mlp learns more with many")}
    return {"name": ("mlp", "dense layers; logistic is safer with few rows"), "hidden": ([64], "units")}


def _training(summary: DataSummary, model: str, each: float) -> Fields:
    images = len(summary.shape) > 1
    steps = 2 * STEPS if images else STEPS
    batch = int(np.clip(each / steps, 4, 32))
    epochs = int(np.clip(ceil(steps * batch / max(each, 1)), 1, 5))
    rate = 0.1 if images else 0.05
    if model == "linear":
        # Inputs have deviation 1, so that steps below 1 / inputs cannot run away, whatever the target's size.
        rate = float(f"{min(0.05, 0.5 / (1 + int(np.prod(summary.shape)))):.1g}")
    if summary.task == "survival":
        whole = "all rows in one step: Cox's loss holds the patients of a step against each other"
        return {"learning_rate": (0.5, ""), "epochs": (5, "steps in a round"), "batch_size": ("full", whole)}
    return {
        "learning_rate": (rate, ""),
        "epochs": (epochs, "passes over its own rows that a client makes in a round"),
        "batch_size": (batch, "rows in one step"),
    }


def _rounds(summary: DataSummary, clients: int) -> Fields:
    fraction = round(default_fraction(clients), 2)
    section: Fields = {
        "count": (20 if fraction == 1 else 30, ""),
        "fraction": (fraction, "share of the clients that train in a round"),
    }
    if summary.classes and (measure := _measure(summary, clients)):
        section["measure"] = measure
    elif summary.classes:
        usual = max(summary.classes.values()) / sum(summary.classes.values())
        target = round(usual + 0.6 * (1 - usual), 2)
        section["target"] = (target, f"accuracy to reach; always guessing the commonest class gives {usual:.0%}")
        section["share"] = (0.5, "of the clients")
    return section


def _measure(summary: DataSummary, clients: int) -> tuple[str, str] | None:
    """Return the measure that leads where a class is rare, with why; None where accuracy says enough."""
    rare, rows = min(summary.classes.items(), key=lambda item: item[1])
    share = rows / sum(summary.classes.values())
    if share >= RARE / len(summary.classes):
        return None
    why = f"{share:.1%} of the rows are '{shown(rare)}', and accuracy says little of so few"
    # A client whose test rows are of one class has no ROC AUC.
    usual = len(summary.classes) == 2 and 0.2 * rows / clients >= ENOUGH_RARE
    return ("roc-auc" if usual else "balanced-accuracy"), why


MEASURED = {
    "classes": ("VP", "how well the client's model does on the server's validation set"),
    "survival": ("VC", "how well the client's model orders patients on the server's validation set"),
    "segmentation": ("VM", "how well the masks of the client's model cover those of the server's validation set"),
    "regression": ("VE", "how small the error of the client's model is on the server's validation set"),
}
"""By task, the criterion that the server measures on its rows, where targets are above 0 in a regression."""


def _weighing(summary: DataSummary, partition: Fields) -> tuple[Fields, str]:
    found = MEASURED.get(summary.task) if summary.task != "regression" or summary.positive else None
    criteria = dict([found]) if found is not None and "server" in partition else {}
    if summary.empty > 0.01:
        criteria["CR"] = "how complete its records are"
    if len(criteria) < 2 and summary.classes:
        # Of two classes nearly every client knows both: LD distinguishes nobody. CB grows with LE, but steeply: it
        # rewards wrong labels, which even a mix out, and lost to size alone (docs/results/celeba.md). LE is milder.
        name = "LE" if len(summary.classes) == 2 else "LD"
        criteria[name] = "how evenly it holds the classes" if name == "LE" else "how many classes it knows"
    elif not criteria:
        criteria["AG"] = "how far its update agrees with the others'"
    criteria["DS"] = "its size"
    priority = ">".join(criteria)
    text = "; then ".join(criteria.values())
    fields: Fields = {
        "criteria": (list(criteria), "`steelyard list criteria` shows others"),
        "priority": (priority, f"first {text}"),
        "normalise": ("max", "divided by the cohort's best, so that the later criteria keep their say"),
    }
    return fields, priority


def _relative(path: Path, file: Path) -> str:
    """Return the data's path as the file should name it: relative where the two lie close together."""
    whole = path.resolve()
    relative = Path(os.path.relpath(whole, file.parent.resolve()))
    return relative.as_posix() if relative.parts.count("..") <= 2 else whole.as_posix()


def _name(file: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("._-")[:60] or "experiment"


def _text(name: str, sections: Mapping[str, Fields], summary: DataSummary, data: str) -> str:
    lines = [f"# {line}" for line in summary.account]
    lines += [f"# Hint: {line}" for line in summary.hints]
    lines += ["", f"name = {toml(name)}", f"description = {toml(f'A first experiment on {data}.')}", "seed = 1"]
    for title, section in sections.items():
        lines += ["", *([f"# {ABOVE[title]}"] if title in ABOVE else []), f"[{title}]"]
        for key, (value, comment) in section.items():
            lines += _written(f"{key} = {toml(value)}", comment)
    # A comment must not end before its line does, whatever a column is called.
    return "\n".join(without_controls(line) for line in lines) + "\n"


def _written(text: str, comment: str) -> list[str]:
    """A field with its comment beside it, or above it where the line would be too long."""
    if not comment:
        return [text]
    beside = f"{text:<32}  # {comment}"
    return [beside] if len(beside) <= LINE else [f"# {comment}:", text]


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def toml(value: object) -> str:
    """Write a value as TOML in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = (letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in value)
        return f'"{"".join(_ESCAPES.get(letter, text) for letter, text in zip(value, plain, strict=True))}"'
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml(str(key))} = {toml(entry)}" for key, entry in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, Sequence):
        return f"[{', '.join(toml(entry) for entry in value)}]"
    return repr(value)
