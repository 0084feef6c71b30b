"""Putting the parts of a comparison together: the run that they become is the one made at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, own_folder, told_as
from steelyard.base.logs import logger
from steelyard.base.processor import DECIDES
from steelyard.base.settings import parse
from steelyard.experiment.code import FOLDER as CODE
from steelyard.experiment.continuing import CODE_FILES, DATA, TEXT, flat_fields
from steelyard.experiment.job_array import PART, in_order
from steelyard.experiment.loading import RUN_FILE, read_experiment
from steelyard.experiment.parts import federations_of, part_of
from steelyard.proof.signing import head_key
from steelyard.runs.chain import require_whole
from steelyard.runs.glance import this_process
from steelyard.runs.history import History
from steelyard.runs.joining import join_rounds, set_up
from steelyard.runs.store import exists
from steelyard.weighing.rule import unlimited

_log = logger(__name__)

_SAME = (CODE_FILES, "seeds", "in_memory")
"""Facts, beside the experiment, in which all parts of one comparison agree."""
_OWN = (PART, "tracked_as", "writer")
"""Facts of a part alone."""


def join_runs(folders: Sequence[Path], out: Path) -> Path:
    """Make one run in a new folder of all parts of a comparison, given in any order; returns the folder.

    The parts stay as they are. What is missing, doubled, not at its end or of another experiment is named.
    """
    histories = {folder: History(folder) for folder in folders}
    parts = in_order({folder: part_of(history) for folder, history in histories.items()})
    found = [histories[folder] for folder in parts]
    for history in found:
        if history.info.get("status") != "finished":
            raise UserError(
                f"{history.folder}: is not at its end; allowed: parts that are (`steelyard resume {history.folder}` "
                "goes on with one that was stopped)"
            )
        require_whole(history.chain, history.folder, accept=False)
        _check_same(found[0], history)
    out = own_folder(out, "--out")
    if exists(out):
        raise UserError(f"--out: {out} holds a run already; allowed: a new folder")
    experiment = read_experiment(parts[0])
    names = [one.name for one in federations_of(experiment, json.loads(found[0].info["seeds"]))]
    held = [name for history in found for name in history.federations["federation"]]
    if sorted(held) != sorted(names):
        raise UserError(f"{parts[0]}: the parts hold other rules and seeds than the comparison; allowed: as written")
    every = experiment.resolved().store.clients_every
    facts = _facts(found)
    code = [name for name in files.names_in(parts[0] / CODE) if name.endswith(".py")]
    with told_as(f"{out}: cannot be written", "a writable folder", kind=MachineError):
        for name in code:
            files.write(out / CODE / name, files.read_bytes(parts[0] / CODE / name))
    made = [RUN_FILE, *([CODE] if code else [])]
    set_up(
        *(out, {RUN_FILE: found[0].info[TEXT]}, facts, (), made),
        fill=lambda draft: join_rounds(draft, parts, names, every, head_key()),
    )
    return out


def _check_same(first: History, other: History) -> None:
    """Refuse a part of another comparison; say where parts were computed differently, which may show in last bits."""
    before, now = (flat_fields(parse(one.info.get(TEXT, ""), str(one.folder))) for one in (first, other))
    fields = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    fields += [name for name in _SAME if first.info.get(name) != other.info.get(name)]
    data, others = (cast("dict[str, Any]", json.loads(one.info.get(DATA, "{}"))) for one in (first, other))
    fields += [f"the data of seed {seed}" for seed in data.keys() & others.keys() if data[seed] != others[seed]]
    if fields:
        raise UserError(
            f"{other.folder}: is a part of another comparison than {first.folder}, which differs in {fields[0]}; "
            "allowed: parts of one"
        )
    for name in ("version_steelyard", *DECIDES, "engine_choice", "device"):
        if (one := first.info.get(name)) != (two := other.info.get(name)):
            _log.warning(
                f"{name}: {one} in {first.folder}, {two} in {other.folder}: last bits may differ from one run's"
            )


def _facts(histories: Sequence[History]) -> dict[str, str]:
    """Return the facts of the whole: what parts agree on, tables of all, largest peaks, all texts that differ."""
    known = [{key: value for key, value in one.info.items() if key not in (*_OWN, "schema")} for one in histories]
    facts: dict[str, str] = {}
    for key in dict.fromkeys(key for one in known for key in one):
        values = list(dict.fromkeys(one[key] for one in known if key in one))
        facts[key] = values[0] if len(values) == 1 else _merged(values)
    facts |= {"notes": text} if (text := _notes(histories)) else {}
    return facts | {"writer": this_process().text()}


def _merged(values: Sequence[str]) -> str:
    try:
        found: list[Any] = [json.loads(value) for value in values]
    except ValueError:
        return "; ".join(values)
    if all(isinstance(one, dict) for one in found):
        return json.dumps({key: value for one in found for key, value in one.items()})
    if all(isinstance(one, list) for one in found):
        return json.dumps(sorted({value for one in found for value in one}))
    return values[found.index(max(found))] if all(isinstance(one, int | float) for one in found) else "; ".join(values)


def _notes(histories: Sequence[History]) -> str:
    """Return the notes of all parts: those on rules once for all rules, as one run writes them."""
    rules = read_experiment(histories[0].folder).rules()
    trust = [json.loads(history.info.get("trust", "{}")) for history in histories]
    notes: list[str] = []
    for history, mine in zip(histories, trust, strict=True):
        on_rules = "; ".join(unlimited((rules[name], mine[name]) for name in rules if name in mine))
        notes.append(history.info.get("notes", "").removesuffix(on_rules).removesuffix("; "))
    known = {name: each for mine in trust for name, each in mine.items()}
    on_rules = unlimited((settings, known[name]) for name, settings in rules.items() if name in known)
    return "; ".join(note for note in dict.fromkeys([*notes, *on_rules]) if note)
