"""The archive of an arena: one file with the suite, the candidate, seeds, versions, figures and digests of all models.

Whoever has it can compute the verdict again, compare it with the runs where they are still there, and run a part of it
anew to the same bits. It holds no code: of a candidate's own file it has the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.base.settings import Section, validated
from steelyard.experiment.description import READING
from steelyard.studies.scenes import SceneFigures
from steelyard.studies.verdict import ArenaVerdict

ARCHIVE = "arena.json"
FORMAT = 2
LONGEST = 20_000_000
"""Bytes of an archive that are read; none of ours comes near."""

PlanT = TypeVar("PlanT")


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


class Archive(Section, Generic[PlanT]):
    """What an archive holds, beside its own format and digest."""

    verdict: ArenaVerdict
    versions: dict[str, str]
    plan: PlanT
    """The arena, with code by its content."""
    figures: dict[str, SceneFigures]
    replayed: Replayed | None

    def write(self, path: Path) -> None:
        """Write the file."""
        content = {"format": FORMAT, **self.model_dump(mode="json")}
        text = json.dumps({**content, "digest": digest(content)}, indent=1, ensure_ascii=False)
        with told_as(f"{path.parent}: cannot be written", "a writable folder"):
            files.write(path, f"{text}\n".encode("utf-8", "replace"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file holds; one whose digest is not that of its content is refused, as are older formats."""
        refused = f"{path}: is no archive of the arena"
        allowed = f"allowed: the {ARCHIVE} of an arena's folder"
        try:
            content: Any = json.loads(files.read_bytes(path, LONGEST))
        except FileNotFoundError:
            raise UserError(f"--check: there is no file {path}; {allowed}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{refused} ({type(error).__name__}); {allowed}") from None
        fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        if fields.get("format") == 1:
            raise UserError(
                f"{path}: is of format 1, without the verdict; allowed: format {FORMAT}, or steelyard 0.2.0"
            )
        if fields.get("format") != FORMAT:
            raise UserError(f"{refused} of format {FORMAT}; {allowed}")
        if fields.pop("digest", None) != digest(fields):
            raise UserError(
                f"{path}: was changed since it was written: its digest is another; allowed: the file as it was"
            )
        del fields["format"]
        return validated(cls, fields, str(path), READING)


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything else in an archive, in a form that white space does not change."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
