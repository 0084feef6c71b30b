"""When an adapter writes its run folder: a round is written once all of it is known, its tests too."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.adapters.recorder import ClientTest, Recorder
from steelyard.adapters.rounds import Combined, WeighedRounds
from steelyard.base.errors import UserError, path_of


@dataclass(eq=False)
class PendingRound:
    """A round until all of it is known."""

    combined: Combined
    tests: dict[str, ClientTest] = field(default_factory=dict[str, ClientTest])
    server: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(eq=False)
class Journal:
    """The folder of one federation; without a folder it notes the round under way and writes nothing."""

    weighing: WeighedRounds
    folder: str | Path | None
    framework: str
    measure: str
    keep_models: bool
    pending: PendingRound | None = None
    _recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.folder = None if self.folder is None else path_of(self.folder, "folder")

    def open(self, rounds: int | None = None) -> None:
        """Open the folder, unless it is open, and go on after its last round."""
        if self.folder is None or self._recorder is not None:
            return
        self._recorder = Recorder(
            self.folder,
            self.weighing.rule,
            framework=self.framework,
            rounds=rounds,
            measure=self.measure,
            keep_models=self.keep_models,
        )
        self.weighing.go_on(self._recorder.round, self._recorder.memory)

    def end_round(self, combined: Combined) -> None:
        """Note what came of a round; tests of its model may follow before the next one ends."""
        self.write()
        self.pending = PendingRound(combined)

    def write(self) -> None:
        """Write the round that is at its end."""
        pending, self.pending = self.pending, None
        if pending is None or self._recorder is None:
            return
        found = pending.combined
        self._recorder.write(
            found.weights,
            found.measures,
            scores=found.scores,
            samples=found.samples,
            reasons=found.reasons,
            tests=pending.tests,
            server=pending.server,
            model=found.arrays,
            memory=self.weighing.memory,
        )

    def close(self) -> None:
        """Write the last round, say that the federation is at its end, and close the folder."""
        self.write()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.finish()

    def stop(self, error: BaseException | None = None) -> None:
        """Write the last round, say that the federation stopped before its end, and close the folder."""
        if self._recorder is None:
            return
        with suppress(UserError):  # what went wrong first is what is reported
            self.write()
            self._recorder.stop(error)
        self._recorder = None
