"""The answer of an arena for people, as text and as a page: the sentence, a line for each scene, the ranks.

The page has no scripts and needs no network; text from a candidate's file is escaped.
"""

from __future__ import annotations

from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import told_as
from steelyard.base.measures import UNKNOWN, show_estimate
from steelyard.report.rendering import Block, Table, filled
from steelyard.studies.suite import NOT_WHOLE
from steelyard.studies.verdict import ArenaDocument, ArenaScene

LONGEST_REASON = 24
"""Letters of a reason in a cell."""


def arena_parts(document: ArenaDocument) -> list[Block]:
    """Return the answer for a terminal; the sentence comes first."""
    failed = tuple(failure_lines(document))
    return [document.sentence, *arena_tables(document), *([failed] if failed else [])]


def arena_tables(document: ArenaDocument) -> list[Table]:
    """Return a line for each scene, and every rule over the scenes where there are more than the two."""
    return [_scenes(document), *([_rules(document)] if len(document.ranks) > 2 else [])]


def _scenes(document: ArenaDocument) -> Table:
    name, base = document.candidate, document.baseline
    whole = "" if document.whole else NOT_WHOLE
    title = f"{name} against {base}: suite {document.suite}, version {document.version}{whole}"
    if not any(scene.rules for scene in document.scenes):
        # An idea that failed everywhere: nothing but dashes would stand between.
        return Table(title, ("task", "verdict"), tuple((row.scene, row.verdict) for row in document.scenes))
    return Table(
        title,
        ("task", f"{base} (%)", f"{name} (%)", "gain (points)", "p (Holm)", "worst client, gain", "verdict"),
        tuple(_cells(scene, document) for scene in document.scenes),
        _note(document),
    )


def _note(document: ArenaDocument) -> str:
    opened = document.opened
    counts = sorted({scene.seeds for scene in document.scenes if scene.seeds}) or [len(document.seeds)]
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    what = "One seed" if counts == [1] else f"Mean of {seeds} seeds ± half the 95% interval"
    tests = "Tests that may be looked at after any seed (betting on signs)" if opened else "Paired t-tests"
    gain = document.gain_over_seeds
    several = gain is not None and len(document.scenes) > 1
    mean = f" Mean gain {show_estimate(gain, 1, 100.0, signed=True)} points." if several else ""
    return (
        f"{what}, on samples that no choice used.{mean} {tests}, "
        f"Holm's correction over the tasks. Equal: within {100 * document.margin:g} point by two one-sided tests."
    )


def _cells(scene: ArenaScene, document: ArenaDocument) -> tuple[str, ...]:
    by_rule = {row.rule: row for row in scene.rules}
    base, mine = by_rule.get(document.baseline), by_rule.get(document.candidate)
    p = scene.p_holm
    return (
        scene.scene,
        show_estimate(base.value if base else None, 1, 100.0),
        _failed(scene.failed) if scene.failed else show_estimate(mine.value if mine else None, 1, 100.0),
        show_estimate(scene.gain, 1, 100.0, signed=True),
        UNKNOWN if p is None else f"{p:.2g}",
        show_estimate(scene.worst_gain, 1, 100.0, signed=True),
        _verdict(scene, document.level),
    )


def _failed(why: str) -> str:
    """Return the heart of a reason for a cell; the whole of it is a line below the table."""
    heart = why.partition("; allowed")[0].rpartition(": ")[2]
    return f"failed: {heart if len(heart) <= LONGEST_REASON else f'{heart[: LONGEST_REASON - 1]}…'}"


def _verdict(scene: ArenaScene, level: float) -> str:
    equal = scene.equal_p_holm is not None and scene.equal_p_holm < level
    return f"{scene.verdict}, within the margin" if equal and scene.verdict in ("better", "worse") else scene.verdict


def _rules(document: ArenaDocument) -> Table:
    critical = document.critical_difference
    differ = "apart do not differ significantly (Nemenyi, 5%)."
    apart = "" if critical is None else f" Mean ranks less than {critical:.2f} {differ}"
    ranked, of = {row.rule for row in document.ranks}, len(document.scenes)
    every = sum({row.rule for row in scene.rules} >= ranked for scene in document.scenes)
    where = "" if every == of else f" Over the {every} of {of} tasks in which every rule has figures."
    return Table(
        "Every rule over the tasks",
        ("rule", "mean rank", "accuracy (%)", "worst client (%)"),
        tuple(
            (row.rule, f"{row.rank:.2f}", *(show_estimate(value, 1, 100.0) for value in (row.value, row.worst)))
            for row in document.ranks
        ),
        f"Rank 1 is the best. Accuracies: mean over the tasks ± half the 95% interval over the seeds.{where}{apart}",
    )


def failure_lines(document: ArenaDocument) -> list[str]:
    """Return a line for each scene in which the candidate failed, with the reason."""
    return [f"{scene.scene}: failed: {scene.failed}" for scene in document.scenes if scene.failed]


def arena_html(document: ArenaDocument) -> str:
    """Return the answer as one page that opens without a network."""
    # For speed of start: only who asks for the page has it drawn.
    from steelyard.report.figures import svg
    from steelyard.studies.charts import gain_chart, rank_chart

    # With very few scenes no difference of ranks is critical, and the picture has no bars.
    apart = "" if document.critical_difference is None else ", and which do not differ significantly"
    drawn = {
        "Gain in each task": gain_chart(document),
        f"Every rule by its mean rank{apart}": rank_chart(document),
    }
    facts = {
        "suite": f"{document.suite}, version {document.version}{'' if document.whole else ', not the whole'}",
        "SHA-256 of the suite": document.sha256,
        "seeds": ", ".join(map(str, document.seeds)),
        "level of the tests": f"{100 * document.level:g}%",
    }
    if document.tried:
        facts["settings tried"] = ", ".join(f"{name}: {100 * value:.1f}%" for name, value in document.tried.items())
    return filled(
        "arena.html.j2",
        title=f"{document.candidate} in the arena",
        sentence=document.sentence,
        figures={title: svg(chart) for title, chart in drawn.items() if chart is not None},
        tables=arena_tables(document),
        failed=failure_lines(document),
        what=facts,
    )


def write_page(document: ArenaDocument, path: Path) -> None:
    """Write the page."""
    with told_as(f"{path.parent}: cannot be written", "a writable folder"):
        files.write(path, arena_html(document).encode("utf-8", "replace"))


def draw(document: ArenaDocument, path: Path) -> None:
    """Write the ranks as a picture, where there are enough rules for one."""
    # For speed of start: only an arena that has ended is drawn.
    from steelyard.report.figures import write_figure
    from steelyard.studies.charts import rank_chart

    if (chart := rank_chart(document)) is not None:
        write_figure(chart, path)
