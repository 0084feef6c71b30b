"""The archive of an arena: one file with the suite, the candidate, seeds, versions, figures and digests of all models.

Whoever has it can compute the answer again, hold it against the runs where they are still there, and run a part of it
anew to the same bits. It holds no code: of a candidate's own file it has the digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.base.processor import in_words, same_kind
from steelyard.base.settings import Section, validated
from steelyard.experiment.loading import content_name, rename_code
from steelyard.experiment.resuming import versions
from steelyard.experiment.running import run
from steelyard.report.decide import reported
from steelyard.runs.history import History
from steelyard.studies.arena import Arena, arena_of, is_arena, read_arena
from steelyard.studies.scenes import SceneFigures, read_figures, rivals_folder, run_figures, scene_folder
from steelyard.studies.study import finished
from steelyard.studies.verdict import ArenaDocument, claims, judge

APART = 2
"""Test samples by which the part's accuracy may differ where another kind of processor trained it: twice the most that
`python -m benchmarks.processors` finds between the settings of one processor, and at least 2, since it found none in
100 repeats and other processors were not at hand."""
REPLAY = "replay"
"""The folder in an arena's folder with the run of the part, in one of its scene's name."""
PLAIN = ("compute.engine=loop", "compute.device=cpu")


class Replayed(Section):
    """What the part came to: the digest of its last model, its accuracy, and on how many samples of the server."""

    scene: str
    seed: int
    model: str
    value: float
    samples: int = 0
    """0 in archives before 0.3, which did not say."""

    def apart(self, other: Replayed) -> float:
        """Return by how many test samples two accuracies of the part differ."""
        return round(abs(self.value - other.value) * (self.samples or other.samples), 6)


def replayed_scene(arena: Arena, figures: Mapping[str, SceneFigures]) -> str | None:
    """Return the scene of the part: the one that the suite names, else the first, where the baseline has figures."""
    ready = [name for name, found in figures.items() if arena.suite.baseline in found.values]
    return arena.suite.replay if arena.suite.replay in ready else next(iter(ready), None)


def replay(arena: Arena, figures: Mapping[str, SceneFigures], out: Path, *, progress: bool = False) -> Replayed | None:
    """Run the part into a folder of its scene's name, unless it is there; None where the baseline has no figures."""
    baseline, seed = arena.suite.baseline, min(arena.seeds)
    if (scene := replayed_scene(arena, figures)) is None:
        return None
    out = out / scene  # a scene that failed at first may come before this one later
    if not finished(out):
        alone = replace(arena, changes=(*arena.changes, *PLAIN))
        experiment = alone.scene(scene, rivals=[baseline], candidate=False)
        run(experiment, out=out, seeds=[seed], progress=progress)
    found, samples = run_figures(out, baseline), reported(History(out))
    model, value = found.models[baseline][0], found.values[baseline][0]
    return Replayed(scene=scene, seed=seed, model=model, value=value, samples=samples.get(str(seed), 0))


def distance(arena: Arena, figures: Mapping[str, SceneFigures], now: Replayed) -> float:
    """Return how far the part's accuracy is from that of the scene, where the baseline trained beside all others."""
    values = figures[now.scene].values[arena.suite.baseline]
    return abs(values[sorted(arena.seeds).index(now.seed)] - now.value)


def shifted(
    arena: Arena, figures: Mapping[str, SceneFigures], now: Replayed, samples: float
) -> dict[str, SceneFigures]:
    """Return the figures as they would be if the part had so many more samples right, or fewer."""
    baseline, scene = arena.suite.baseline, figures[now.scene]
    values = list(scene.values[baseline])
    values[sorted(arena.seeds).index(now.seed)] += samples / now.samples
    changed = scene.model_copy(update={"values": {**scene.values, baseline: tuple(values)}})
    return {**figures, now.scene: changed}


# The archive itself.


ARCHIVE, PICTURE, REPORT = "arena.json", "arena.svg", "report.html"
FORMAT = 1
LONGEST = 20_000_000
"""Bytes of an archive that are read; none of ours comes near."""


@dataclass(frozen=True)
class Archive:
    """What an archive holds, once its own digest was compared."""

    arena: Arena
    figures: Mapping[str, SceneFigures]
    sentence: str
    versions: Mapping[str, str]
    replayed: Replayed | None


def write_arena_files(folder: Path) -> ArenaDocument:
    """Write the archive, the picture and the report of an arena's folder; return the answer that they show."""
    # For speed of start: only an arena that has ended is drawn.
    from steelyard.report.figures import write_figure
    from steelyard.studies.arena_page import arena_html, rank_chart

    document = write_archive(folder)
    chart = rank_chart(document)
    if chart is not None:
        write_figure(chart, folder / PICTURE)
    _write(folder / REPORT, arena_html(document))
    return document


def write_arena_report(folder: Path, path: Path) -> None:
    """Write the report of an arena as far as it has come; the archive stays as it is."""
    # For speed of start: only who asks for the page draws it.
    from steelyard.studies.arena_page import arena_html

    arena = read_arena(folder)
    _write(path, arena_html(judge(arena, read_figures(folder, arena))))


def write_archive(folder: Path) -> ArenaDocument:
    """Write the archive of an arena's folder, as far as its scenes are done, and return the answer that it holds."""
    arena = read_arena(folder)
    figures = read_figures(folder, arena)
    document = judge(arena, figures)
    replayed = replay(arena, figures, folder / REPLAY)
    plan = arena.document()
    rename_code(plan["experiment"], content_name)
    content: dict[str, Any] = {
        "format": FORMAT,
        "sentence": document["sentence"],
        "versions": versions(),
        "plan": plan,
        "figures": {name: found.model_dump(mode="json") for name, found in figures.items()},
        "replayed": None if replayed is None else replayed.model_dump(mode="json"),
    }
    text = json.dumps({**content, "digest": digest(content)}, indent=1, ensure_ascii=False)
    _write(folder / ARCHIVE, f"{text}\n")
    return document


def _write(path: Path, text: str) -> None:
    with told_as(f"{path.parent}: cannot be written", "a writable folder"):
        files.write(path, text.encode("utf-8", "replace"))


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything else in an archive, in a form that white space does not change."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_archive(path: Path) -> Archive:
    """Return what an archive holds; one whose digest is not that of its content is refused."""
    refused = f"{path}: is no archive of the arena"
    try:
        content: Any = json.loads(files.read_bytes(path, LONGEST))
    except FileNotFoundError:
        raise UserError(f"--check: there is no file {path}; allowed: the {ARCHIVE} of an arena's folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{refused} ({type(error).__name__}); allowed: the {ARCHIVE} of an arena's folder") from None
    if not isinstance(content, dict) or cast("dict[str, Any]", content).get("format") != FORMAT:
        raise UserError(f"{refused} of format {FORMAT}; allowed: the {ARCHIVE} of an arena's folder")
    written = cast("dict[str, Any]", content).pop("digest", None)
    if written != digest(cast("dict[str, Any]", content)):
        raise UserError(f"{path}: was changed since it was written: its digest is another; allowed: the file as it was")
    try:
        arena = arena_of(content["plan"], str(path))
        figures = {str(name): validated(SceneFigures, found, str(path)) for name, found in content["figures"].items()}
        replayed = None if content["replayed"] is None else validated(Replayed, content["replayed"], str(path))
        return Archive(arena, figures, str(content["sentence"]), dict(content["versions"]), replayed)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{refused} ({error!r}); allowed: the {ARCHIVE} of an arena's folder") from None


@dataclass(frozen=True)
class Checked:
    """What a look at an archive has shown, a line each, and whether something in it does not hold."""

    lines: tuple[str, ...]
    differs: bool
    undecided: bool = False
    """Another kind of processor made it, and what may come of that alone would turn a verdict."""

    @property
    def code(self) -> int:
        """What the command ends with: 0 it holds, 1 something differs, 2 this processor cannot decide."""
        return 1 if self.differs else 2 if self.undecided else 0


def check_archive(path: Path, *, anew: bool = True, progress: bool = False) -> Checked:
    """Compute an archive's answer again, hold it against the runs beside it, and run a part of it anew."""
    archive = read_archive(path)
    lines = [f"whole: the digest is that of the content; suite {archive.arena.suite.name}, "
             f"version {archive.arena.suite.version}"]  # fmt: skip
    problems: list[str] = []
    document = judge(archive.arena, archive.figures)
    again = document["sentence"]
    if claims(again, document) == claims(archive.sentence, document):
        how = "" if again == archive.sentence else ", in today's words"
        lines.append(f"the figures say the same{how}: {again}")
    else:
        problems.append(f"DIFFERS: the sentence is {archive.sentence!r}, and the figures say {again!r}")
    found = _beside(archive, path.parent)
    (problems if any(line.startswith("DIFFERS") for line in found) else lines).extend(found)
    undecided = False
    if anew:
        line = _replayed(archive, progress)
        undecided = line.startswith("UNDECIDED")
        (problems if line.startswith("DIFFERS") else lines).append(line)
    return Checked((*lines, *problems), bool(problems), undecided)


def _beside(archive: Archive, folder: Path) -> list[str]:
    """Hold the figures against those of the runs in the archive's folder, whose chains are computed again."""
    count = len(archive.arena.batches)
    if not is_arena(folder):
        return ["the runs are not beside it: their figures are taken as they stand"]
    now = read_figures(folder, archive.arena)
    changed = [name for name, found in archive.figures.items() if now.get(name) != found]
    if changed:
        return [f"DIFFERS: the run of scene {name} has other figures or another head" for name in changed]
    runs = [(name, scene_folder(folder, name, batch)) for name in now for batch in range(1, count + 1)]
    runs += [(name, rivals_folder(run)) for name, run in runs]
    broken = [f"DIFFERS: the run of scene {name}: {problem}" for name, run in runs if (problem := _broken(run))]
    scenes = f"{len(now)} scene{'' if len(now) == 1 else 's'}"
    return broken or [f"the runs of {scenes} are whole and have these figures"]


def _broken(run: Path) -> str:
    return History(run).chain.problem if finished(run) else ""


def _replayed(archive: Archive, progress: bool) -> str:
    """Run the part of the archive anew and compare the model's bits, or what another processor cannot change."""
    was = archive.replayed
    if was is None:
        return "nothing to replay: no scene has figures"
    with tempfile.TemporaryDirectory() as place:
        now = replay(archive.arena, archive.figures, Path(place) / REPLAY, progress=progress)
    assert now is not None
    return replay_answer(archive, was, now, versions())


def replay_answer(archive: Archive, was: Replayed, now: Replayed, here: Mapping[str, str]) -> str:
    """Say whether the part that was run anew is that of the archive; `here` is what runs it now.

    What an archive says of its processor is a claim. So the scene's figure is held to the part as it came out here, and
    a verdict that the samples allowed to another processor would turn is undecided.
    """
    what = f"{archive.arena.suite.baseline} in scene {was.scene}, seed {was.seed}"
    same = (now.scene, now.seed, now.model, now.value) == (was.scene, was.seed, was.model, was.value)
    if not same and (now.scene, now.seed) != (was.scene, was.seed):
        return f"DIFFERS: replayed {now.scene}, seed {now.seed}, where the archive has {what}"
    made = in_words(archive.versions)
    if not same and same_kind(archive.versions, here):
        return f"DIFFERS: replayed {what}: another model, on the same kind of processor ({made})"
    margin, apart = archive.arena.suite.margin, distance(archive.arena, archive.figures, now)
    allowed = 0 if same else APART
    if not same and now.apart(was) > allowed:
        return (
            f"DIFFERS: replayed {what}: {_samples(now.apart(was), now.samples)} apart, "
            f"where another processor changes at most {allowed}; made on {made}"
        )
    if apart > margin + allowed / now.samples:
        return f"DIFFERS: replayed {what}: {100 * apart:.1f} points from the figure of the scene"
    if same:
        return f"replayed {what}: the same model, bit for bit"
    agrees = f"replayed {what}: agrees within {_samples(now.apart(was), now.samples)}; made on {made}"
    if apart > margin:
        return f"UNDECIDED: {agrees}; the scene's own figure is {100 * apart:.1f} points away"
    verdicts = {_verdict(archive, shifted(archive.arena, archive.figures, now, by)) for by in (-allowed, 0, allowed)}
    if len(verdicts) > 1:
        return f"UNDECIDED: {agrees}; {allowed} samples more or fewer would turn the verdict"
    return agrees


def _verdict(archive: Archive, figures: Mapping[str, SceneFigures]) -> tuple[str, ...]:
    """Return what an archive decides: the verdict of the sentence, and that of each scene."""
    document = judge(archive.arena, figures)
    return claims(document["sentence"], document)[0], *(scene["verdict"] for scene in document["scenes"])


def _samples(apart: float, of: int) -> str:
    # A figure is the mean of the last rounds, so it may be a part of a sample off.
    return f"{math.ceil(apart)} of {of} samples"
