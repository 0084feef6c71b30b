"""An arena: a candidate against the rivals of a frozen suite, one comparison a scene, and what their figures say.

Scenes are one family: with ten of them, a rule that is no better is called better in any of them in one case of twenty
at most. Whether it is equal within the margin is another question, which the same correction answers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base import files
from steelyard.base.errors import MachineError, Stopped, UserError, listed, one_line
from steelyard.base.files import REPORT
from steelyard.base.logs import logger
from steelyard.base.measures import Estimate, estimate
from steelyard.base.settings import Section, validated
from steelyard.experiment.description import (
    Description,
    FederationSettings,
    federation_label,
)
from steelyard.experiment.parts import Part
from steelyard.experiment.resuming import versions
from steelyard.experiment.rules import parse_rules
from steelyard.experiment.running import run
from steelyard.report.rendering import Block
from steelyard.report.statistics import (
    ALPHA,
    LEAST_SEEDS,
    anytime_equivalence_p,
    anytime_p,
    equivalence_p,
    holm,
    paired_p,
    spent,
    verdict,
)
from steelyard.runs.history import History
from steelyard.studies.archive import (
    ARCHIVE,
    FAILED,
    RIVALS,
    Archive,
    Replayed,
    SceneFigures,
    joined,
    left_out_for_all,
    rivals_folder,
    run_figures,
    scene_figures,
)
from steelyard.studies.arena_page import arena_parts, draw, write_page
from steelyard.studies.candidate import BESIDE, Candidate, opening
from steelyard.studies.study import ALONE, Cell, How, Study, fields_of, finished, run_or_resume
from steelyard.studies.suite import Suite, load_suite, suites
from steelyard.studies.verdict import (
    OPEN,
    ArenaDocument,
    ArenaRank,
    ArenaRule,
    ArenaScene,
    Decision,
    critical_difference,
    mean_ranks,
)

SCENES = "scenes"
"""The folder in an arena's folder that holds one run for each scene."""
REPLAY = "replay"
"""The folder in an arena's folder with the run of the part that a check runs anew, in one of its scene's name."""
PICTURE = "arena.svg"
PLAIN = ("compute.engine=loop", "compute.device=cpu")

_log = logger(__name__)


def _suite(given: object) -> Suite:
    if isinstance(given, Suite):
        return given
    if not isinstance(given, str) or given not in suites():
        raise PydanticCustomError("plain", listed(suites()))  # pyright: ignore[reportArgumentType]
    return load_suite(given)


class _Sections(Section):
    """A rule and its algorithm as the sections of an experiment."""

    weighing: FederationSettings
    algorithm: Annotated[AlgorithmSettings | None, BeforeValidator(lambda given: given or None)] = None
    beside: dict[str, FederationSettings] = Field(default_factory=dict[str, FederationSettings], max_length=0)


def _rule(given: object) -> FederationSettings:
    if isinstance(given, FederationSettings):
        return given
    sections = validated(_Sections, fields_of(given), "")
    return sections.weighing.model_copy(update={"algorithm": sections.algorithm})


def _in_sections(rule: FederationSettings) -> dict[str, Any]:
    weighing = rule.model_dump(mode="json", exclude_none=True)
    return {"algorithm": weighing.pop("algorithm", {}), "weighing": weighing, "beside": {}}


class Arena(Study):
    """A candidate, and the scenes, seeds and changes with which a suite tests it."""

    kind = "an arena"
    file = files.ARENA_FILE
    one = "task"
    failed = FAILED
    beside = BESIDE

    suite: Annotated[Suite, PlainValidator(_suite), PlainSerializer(lambda suite: suite.name)]
    version: int
    sha256: str
    scenes: Annotated[tuple[str, ...], Field(min_length=1)]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    changes: tuple[str, ...] = ()
    tried: dict[str, float] = Field(default_factory=dict[str, float])
    """The settings among which the candidate was chosen, with their accuracy; empty where there was one."""
    opened: int = 0
    """--until-decided: the candidate is the so manyth that opened the held-out seeds; 0 otherwise."""
    candidate: str
    experiment: Annotated[FederationSettings, PlainValidator(_rule), PlainSerializer(_in_sections)]
    """The candidate's rule and algorithm."""

    @model_validator(mode="after")
    def _of_this_suite(self) -> Self:
        suite = self.suite
        if (self.version, self.sha256) != (suite.version, suite.sha256):
            raise UserError(
                f"version: got {self.version} of the suite {suite.name}, and this package has version {suite.version}; "
                "allowed: the package that made it"
            )
        suite.chosen(self.scenes)
        return self

    @property
    def whole(self) -> bool:
        """Whether this is the suite as it is frozen: all scenes, all seeds that report, nothing changed."""
        seeds = self.suite.held_out if self.opened else self.suite.report
        return self.scenes == tuple(self.suite.scenes) and self.seeds == seeds and not self.changes

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """The seeds in the order in which they are run, up to the next look; all at once unless until decided."""
        size = self.suite.batch if self.opened else len(self.seeds)
        return [self.seeds[start : start + size] for start in range(0, len(self.seeds), size)]

    @property
    def draft(self) -> bool:
        """Whether it runs on the seeds for choosing."""
        return set(self.seeds) <= set(self.suite.choose)

    def cells(self) -> list[Cell]:
        """Return a run for each scene; until decided, one for each batch of seeds as well."""
        return [
            Cell(f"{SCENES}/{name}{'' if number == 1 else f'-{number}'}", seeds, name=name)
            for number, seeds in enumerate(self.batches, 1)
            for name in self.scenes
        ]

    def scene(self, name: str, *, rivals: Sequence[str] = (), candidate: bool = True) -> Description:
        """Return the experiment of a scene with its rules: these rivals, else all, and the candidate.

        Until decided, only the baseline runs beside the candidate: further seeds are for the one question.
        """
        rivals = rivals or ([self.suite.baseline] if self.opened else ())
        experiment = self.suite.experiment(name, self.changes)
        rules = parse_rules(rivals or self.suite.rivals, experiment)
        if candidate:
            rules[self.candidate] = self.experiment
        return self.suite.comparison(name, rules, self.seeds[0], self.changes)

    def rivals_of(self, name: str) -> Description:
        """Return the experiment of a scene without the candidate, for one in which it failed."""
        rules = self.scene(name).rules()
        rules.pop(self.candidate, None)
        return self.suite.comparison(name, rules, self.seeds[0], self.changes)

    def described(self, cell: Cell) -> Description:
        """Return the experiment of a scene."""
        return self.scene(cell.name)

    def about(self, cell: Cell) -> str:
        """Return a scene with what is the matter in it."""
        look = f", seeds {cell.seeds[0]} to {cell.seeds[-1]}" if len(self.batches) > 1 else ""
        return f"{cell.name}, {self.suite.scenes[cell.name].about}{look}"

    def check(self, cells: Sequence[Cell]) -> None:
        """Read the data of the scenes: what is missing is said before hours of the first ones."""
        self.suite.check_data([cell.name for cell in cells], self.changes)

    def added_to(self, kept: Study) -> Self:
        """Return the arena with the scenes of one that it goes on from, so that some can be run first."""
        if not isinstance(kept, Arena) or self.part or kept.part or self.opened:
            return self
        return self.model_copy(update={"scenes": self.suite.chosen([*kept.scenes, *self.scenes])})

    def folders(self, cell: Cell) -> Sequence[str]:
        """Return the folders of a scene's run, and of the rivals' own."""
        return (cell.folder, f"{cell.folder}{RIVALS}")

    def looks(self, folder: Path) -> Iterator[Sequence[Cell]]:
        """Give batch after batch of those scenes that the batches before have not decided.

        A look is at whole batches only, so that an arena that was stopped on the way runs what it would have run.
        """
        for number, seeds in enumerate(self.batches):
            before = judge(self, self.figures(folder, number))
            left = {scene.scene for scene in before.scenes if scene.verdict in OPEN}
            yield [cell for cell in self.own if cell.seeds == seeds and cell.name in left]

    def ended(self, folder: Path, cell: Cell) -> bool:
        """Whether a scene has ended, and where it is spoilt for the rivals, so has theirs; failed ones run again."""
        run = folder / cell.folder
        return finished(run) and (not left_out_for_all(History(run)) or finished(rivals_folder(run)))

    def run(self, folder: Path, cell: Cell, how: How = ALONE) -> None:
        """Run a scene; where it ends with a mistake of the candidate's, that is its result, and the rivals run alone.

        What the machine lacks ends the arena, and a further call goes on.
        """
        run = folder / cell.folder
        try:
            if not finished(run):
                run_or_resume(folder, cell, self.described(cell), how)
        except (Stopped, MachineError):
            raise
        except Exception as error:
            if not isinstance(error, UserError) and not self.described(cell).named_code():
                raise  # a fault of ours, and no code of the user's that could be its cause
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            why = one_line(why.removeprefix(f"{cell.folder}: "))
        else:
            why = left_out_for_all(History(run))
        if why:
            _log.info(f"task {cell.name}: {self.candidate} failed: {why}; the other rules run without it")
            if not finished(rivals_folder(run)):
                alone = Cell(f"{cell.folder}{RIVALS}", cell.seeds)
                run_or_resume(folder, alone, self.rivals_of(cell.name), How(how.progress))
        if why and not finished(run):
            self.note_failure(folder, cell, why)
        else:
            self.failure(folder, cell).unlink(missing_ok=True)

    def figures(self, folder: Path, batches: int | None = None) -> dict[str, SceneFigures]:
        """Return the figures of every scene that is done, or failed, in the suite's order."""
        found: dict[str, SceneFigures] = {}
        for name in self.scenes:
            done: list[SceneFigures] = []
            for cell in [cell for cell in self.cells() if cell.name == name][:batches]:
                figures = scene_figures(folder / cell.folder, self.suite.baseline, self.candidate)
                if figures is None:
                    break
                done.append(figures)
            if done:
                found[name] = joined(done)
        return found

    def answer(self, folder: Path) -> ArenaDocument:
        """Return what the scenes that are done say of the candidate."""
        return judge(self, self.figures(folder), str(folder))

    def parts(self, answer: ArenaDocument) -> Sequence[Block]:
        """Return the sentence and the tables."""
        return arena_parts(answer)

    def next_lines(self, answer: ArenaDocument) -> Sequence[str]:
        """Return where the archive and the report are, and what checks them."""
        folder = Path(answer.folder)
        if not files.is_file(folder / ARCHIVE):
            return ()
        check = f"next: steelyard arena --check {shlex.quote(str(folder))}"
        return [f"runs stored in {folder}; archive: {folder / ARCHIVE}", f"report: {folder / REPORT}", check]

    def problem(self, answer: ArenaDocument) -> str:
        """Say that the candidate failed everywhere."""
        return f"arena: no verdict: {answer.sentence}" if answer.decision is Decision.FAILED else ""

    def write_files(self, folder: Path) -> ArenaDocument:
        """Write the archive, the picture and the report, as far as the scenes are done."""
        figures = self.figures(folder)
        document = judge(self, figures, str(folder))
        replayed = self.replay(figures, folder / REPLAY)
        archive = Archive(
            verdict=document.verdict,
            versions=versions(),
            plan=self.by_content(),
            figures=figures,
            replayed=replayed,
        )
        archive.write(folder / ARCHIVE)
        draw(document, folder / PICTURE)
        write_page(document, folder / REPORT)
        return document

    def replay(self, figures: Mapping[str, SceneFigures], out: Path, *, progress: bool = False) -> Replayed | None:
        """Run the part that a check runs anew into a folder of its scene's name, unless it is there.

        That is the baseline by itself, with one seed, in the scene that the suite names or else in the first where it
        has figures; None where it has none.
        """
        baseline, seed = self.suite.baseline, min(self.seeds)
        ready = [name for name, found in figures.items() if baseline in found.values]
        if not ready:
            return None
        scene = self.suite.replay if self.suite.replay in ready else ready[0]
        out = out / scene  # a scene that failed at first may come before this one later
        if not finished(out):
            alone = self.model_copy(update={"changes": (*self.changes, *PLAIN)})
            experiment = alone.scene(scene, rivals=[baseline], candidate=False)
            run(experiment, out=out, seeds=[seed], progress=progress)
        found, samples = run_figures(out, baseline), History(out).facts.report_rows
        model, value = found.models[baseline][0], found.values[baseline][0]
        return Replayed(scene=scene, seed=seed, model=model, value=value, samples=samples.get(str(seed), 0))


def plan(
    suite: Suite,
    candidate: Candidate,
    *,
    scenes: Sequence[str] = (),
    seeds: int | None = None,
    draft: bool = False,
    until_decided: bool = False,
    changes: Sequence[str] = (),
    tried: Mapping[str, float] | None = None,
    part: Part | None = None,
) -> Arena:
    """Return an arena; a scene that cannot be made of the suite and the changes is refused before anything runs.

    `until_decided` notes that the candidate opens the held-out seeds.
    """
    if until_decided and (draft or part is not None):
        other = "--draft" if draft else "--part"
        raise UserError(f"--until-decided: got it with {other}; allowed: one of them, as a look needs every task")
    offered = suite.held_out if until_decided else suite.choose if draft else suite.report
    if seeds is not None and not 1 <= seeds <= len(offered):
        raise UserError(f"--seeds: got {seeds}; allowed: a whole number from 1 to {len(offered)}, the suite's seeds")
    rule = candidate.settings
    if federation_label(rule) != candidate.label:
        rule = rule.model_copy(update={"name": candidate.label})
    planned = Arena(
        suite=suite,
        version=suite.version,
        sha256=suite.sha256,
        scenes=suite.chosen(scenes),
        seeds=offered[:seeds],
        changes=tuple(changes),
        tried=dict(tried or {}),
        candidate=candidate.label,
        experiment=rule,
        part=part,
    )
    for name in planned.scenes:
        planned.scene(name, candidate=False)
    assert planned.own, "a part has a scene or is refused"
    if not until_decided:
        return planned
    # Seeds that open once are not spent on a machine that cannot run them.
    planned.check(planned.own)
    opened = opening(f"{suite.name} {suite.version}", planned.by_content()["experiment"])
    return planned.model_copy(update={"opened": opened})


# What the figures say: a paired test in each scene, Holm over all.


def judge(arena: Arena, figures: Mapping[str, SceneFigures], folder: str = "") -> ArenaDocument:
    """Return what the figures say of the candidate; scenes that are not done yet are named as such."""
    candidate, baseline = arena.candidate, arena.suite.baseline
    sound = [name for name, found in figures.items() if candidate in found.values and baseline in found.values]
    differences = {name: _minus(figures[name].values, candidate, baseline) for name in sound}
    level = spent(ALPHA, arena.opened) if arena.opened else ALPHA
    same = [name for name in sound if _same_models(figures[name].models, candidate, baseline)]
    tests = _until_decided(arena, differences) if arena.opened else _once(arena, differences, same)
    scenes = [_scene(arena, name, figures.get(name), tests.get(name, _NONE), level) for name in arena.scenes]
    verdicts = {scene.scene: scene.verdict for scene in scenes}
    counts = {word: list(verdicts.values()).count(word) for word in ("better", "worse", "failed")}
    gains = [estimate(values).mean for values in differences.values()]
    if not gains:
        decision = Decision.FAILED if counts["failed"] else Decision.NOTHING_DONE
    elif len(arena.seeds) < LEAST_SEEDS:
        decision = Decision.TOO_FEW_SEEDS
    else:
        decision = Decision.BETTER if counts["better"] > counts["worse"] else Decision.NOT_BETTER
    rules, complete = _complete(figures)
    ranks = _ranks(rules, complete)
    alike = len({len(each) for each in differences.values()}) == 1
    return ArenaDocument(
        decision=decision,
        verdicts=verdicts,
        **counts,
        equal=sum(scene.equal_p_holm is not None and scene.equal_p_holm < level for scene in scenes),
        mean_gain=math.fsum(gains) / len(gains) if gains else None,
        folder=folder,
        candidate=candidate,
        baseline=baseline,
        suite=arena.suite.name,
        version=arena.suite.version,
        sha256=arena.suite.sha256,
        whole=arena.whole,
        draft=arena.draft,
        opened=arena.opened,
        level=level,
        tried=arena.tried,
        seeds=arena.seeds,
        margin=arena.suite.margin,
        scenes=tuple(scenes),
        gain_over_seeds=_over_scenes(list(differences.values())) if alike else None,
        ranks=tuple(ranks),
        critical_difference=critical_difference(len(ranks), len(complete)),
    )


_Tests = tuple[float | None, float | None, float | None]
"""The p of a difference, the same and that of equality after Holm's correction."""
_NONE: _Tests = (None, None, None)


def _same_models(models: Mapping[str, Sequence[str]], one: str, other: str) -> bool:
    """Say whether two rules came to the same model, bit for bit, in every seed, as `EQ` and FedAvg on equal sizes."""
    return bool(models.get(one)) and models.get(one) == models.get(other)


def _once(arena: Arena, differences: Mapping[str, Sequence[float]], same: Sequence[str]) -> dict[str, _Tests]:
    """Test scenes whose number of seeds was fixed before; where models are the same, no test need show it."""
    enough = len(arena.seeds) >= LEAST_SEEDS
    raw = [paired_p(each) if enough else None for each in differences.values()]
    equal = [
        0.0 if name in same and enough else equivalence_p(each, arena.suite.margin) if enough else None
        for name, each in differences.items()
    ]
    return dict(zip(differences, zip(raw, holm(raw), holm(equal), strict=True), strict=True))


def _until_decided(arena: Arena, differences: Mapping[str, Sequence[float]]) -> dict[str, _Tests]:
    """Test scenes after any number of seeds; those that are not done yet count in the correction, as 1.

    None of these p ever rises when seeds are added, so a verdict stays what it is.
    """
    raw = [anytime_p(differences.get(name, ())) for name in arena.scenes]
    equal = [anytime_equivalence_p(differences.get(name, ()), arena.suite.margin) for name in arena.scenes]
    found = dict(zip(arena.scenes, zip(raw, holm(raw), holm(equal), strict=True), strict=True))
    return {name: tests for name, tests in found.items() if name in differences}


def _minus(values: Mapping[str, Sequence[float]], one: str, other: str) -> list[float]:
    return [ours - theirs for ours, theirs in zip(values[one], values[other], strict=True)]


def _scene(arena: Arena, name: str, found: SceneFigures | None, tests: _Tests, level: float) -> ArenaScene:
    candidate, baseline = arena.candidate, arena.suite.baseline
    values = {} if found is None else found.values
    both = candidate in values and baseline in values
    gain = estimate(_minus(values, candidate, baseline)) if both else None
    p, p_holm, equal = tests
    if gain is None:
        word = "not done" if found is None else "failed"
    else:
        word = verdict(gain.mean, p_holm, level)
        word = "equal" if word == "not distinguishable" and equal is not None and equal < level else word
    return ArenaScene(
        scene=name,
        about=arena.suite.scenes[name].about,
        where="" if found is None else found.where,
        seeds=len(gain.values) if gain else 0,
        rules=() if found is None else tuple(_figures_of(rule, found, baseline) for rule in found.values),
        gain=gain,
        worst_gain=estimate(_minus(found.worst, candidate, baseline)) if found and both and found.worst else None,
        p=p,
        p_holm=p_holm,
        equal_p_holm=equal,
        verdict=word,
        failed="" if found is None or both else found.failed or f"{baseline} has no figures",
    )


def _figures_of(rule: str, found: SceneFigures, baseline: str) -> ArenaRule:
    against = rule != baseline and baseline in found.values
    return ArenaRule(
        rule=rule,
        value=estimate(found.values[rule]),
        worst=estimate(found.worst.get(rule, ())),
        gain=estimate(_minus(found.values, rule, baseline)) if against else None,
    )


def _complete(figures: Mapping[str, SceneFigures]) -> tuple[list[str], list[SceneFigures]]:
    """Return the rules that have figures anywhere, and the scenes in which every one of them has."""
    every = list(dict.fromkeys(rule for found in figures.values() for rule in found.values))
    return every, [found for found in figures.values() if set(found.values) == set(every) and every]


def _ranks(rules: Sequence[str], scenes: Sequence[SceneFigures]) -> list[ArenaRank]:
    """Return every rule with its mean rank over scenes in which all have figures, the best first."""
    if not scenes:
        return []
    means = [[estimate(found.values[rule]).mean for rule in rules] for found in scenes]
    rows = [
        ArenaRank(
            rule=rule,
            rank=rank,
            value=_over_scenes([found.values[rule] for found in scenes]),
            worst=_over_scenes([found.worst.get(rule, ()) for found in scenes]),
        )
        for rule, rank in zip(rules, mean_ranks(means), strict=True)
    ]
    return sorted(rows, key=lambda row: row.rank)


def _over_scenes(values: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over the scenes, seed by seed, with its interval over the seeds that all scenes have."""
    return estimate([math.fsum(each) / len(values) for each in zip(*values, strict=False)])
