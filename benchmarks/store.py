"""How fast a long run is written and read: `python -m benchmarks.store [ROUNDS CLIENTS]`, times and peak memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.kit import alone, peak_mb, start, table, timed

if TYPE_CHECKING:
    from steelyard.messages.updates import Signed
    from steelyard.proof.signing import SigningKey

STEPS = ("open", "rounds", "weights", "follow", "clients", "evaluations", "summary", "csv")
"""What is timed, each in a process of its own; importing the libraries is not counted."""
TITLES = {
    "step": "step",
    "clock": "seconds",
    "processor": "of the processor",
    "peak_mb": "peak memory, MB",
    "more_mb": "of that, for the step",
}


Sign = Callable[[int, Sequence[str]], "tuple[Signed, ...]"]
"""Returns what nodes sign in a round, given the clients."""
RULE, PARAMETERS = "DS>LD>MD>VP", 1000


def write_run(
    folder: Path, rounds: int, clients: int, sign: Sign | None = None, signer: SigningKey | None = None
) -> float:
    """Write a run of one rule with four criteria, in which every client answers; returns seconds per round.

    `sign` signs for the nodes, `signer` the heads.
    """
    import numpy as np
    import torch

    from steelyard.messages.payloads import DenseModels
    from steelyard.messages.updates import Evaluations, LossState, Updates
    from steelyard.rounds.state import Federation, RoundRecord, RoundState
    from steelyard.runs.facts import RunFacts
    from steelyard.runs.store import Store
    from steelyard.weighing.order import OrderState
    from steelyard.weighing.rule import Rule, WeighingSettings

    draw = np.random.default_rng(0)
    names = tuple(f"client-{number:03d}" for number in range(clients))
    rule = Rule(WeighingSettings(criteria=("DS", "LD", "MD", "VP")))
    store = Store(folder, checkpoint_every=100, signer=signer)
    store.register([Federation(RULE, RULE, 0, rule)])
    state = RoundState(0, torch.zeros(PARAMETERS), LossState(), OrderState((0, 1, 2, 3), 0.5))
    nobody = DenseModels(torch.zeros(0, 1))
    samples = draw.integers(10, 500, clients)
    began = time.perf_counter()
    for round in range(rounds + 1):
        signed = sign(round, names) if sign is not None and round else ()
        asked = Updates(RULE, round, names, samples, {}, draw.random(clients), nobody, signed=signed)
        tested = Evaluations(RULE, round, names, samples, draw.random((1, clients)), draw.random((1, clients)))
        weighing = rule.weigh(draw.random((clients, 4)))
        record = RoundRecord(
            RULE, round, 0.1, asked if round else None, weighing if round else None, (0, 1, 2, 3),
            evaluations=tested, accuracy=float(tested.overall()[0]), loss=LossState(),
        )  # fmt: skip
        store.commit(round, [record], {RULE: state}, dict, last=round == rounds)
    seconds = (time.perf_counter() - began) / rounds
    store.note(RunFacts(status="finished"))
    store.close()
    return seconds


def measure(step: str, folder: Path) -> dict[str, float]:
    """Do one step; returns its seconds and the peak memory of this process in MB, libraries included."""
    import pandas as pd

    from steelyard.experiment.loading import build
    from steelyard.report.result import computed
    from steelyard.runs.export import export_run
    from steelyard.runs.history import History

    before = peak_mb()
    last = History(folder).last_round
    done: dict[str, Callable[[], object]] = {
        "open": lambda: History(folder).info,
        "rounds": lambda: History(folder).rounds,
        "weights": lambda: History(folder).weights(RULE, 0),
        "follow": lambda: (History(folder).rounds_after(last - 1), History(folder).cohorts(RULE, 0, last - 1)),
        "clients": lambda: History(folder).clients,
        "evaluations": lambda: History(folder).evaluations,
        "summary": lambda: computed(folder, build({"data": {"source": "digits"}, "rounds": {"count": last}})),
        "csv": lambda: export_run(History(folder), "csv"),
    }
    pd.DataFrame({"warm": [1]}).groupby("warm").sum()
    took = timed(done[step])
    return {**took._asdict(), "peak_mb": peak_mb(), "more_mb": peak_mb() - before}


def main(
    rounds: Annotated[int, typer.Argument()] = 1000,
    clients: Annotated[int, typer.Argument()] = 371,
    step: Annotated[str, typer.Option(hidden=True)] = "",
    of: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    """Write a run and print what each step takes, as a table."""
    if step:
        print(json.dumps(measure(step, of)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        each = write_run(folder, rounds, clients)
        size = sum(path.stat().st_size for path in folder.glob("run.sqlite*")) / 1e6
        print(f"{rounds} rounds x {clients} clients, 4 criteria; {size:.0f} MB; {1000 * each:.1f} ms a round\n")
        found = [{"step": name, **alone("store", "--step", name, "--of", folder)} for name in STEPS]
    print(table(found, TITLES))


if __name__ == "__main__":
    start(main)
