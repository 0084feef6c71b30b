"""What happens to updates on their way out: one order, whoever puts the steps together."""

from __future__ import annotations

from typing import Any

from steelyard.clients.local import Clock, Hide
from steelyard.clients.protocol import ON_THE_WAY_OUT, Noise, Sending, SendingClients, Step, in_order


def test_steps_stand_in_one_order_however_they_are_given() -> None:
    kinds: list[Any] = [Hide, Noise, Clock]
    steps: list[Step[Sending]] = [kind.__new__(kind) for kind in kinds]
    assert [step.name for step in in_order(steps)] == ["clock", "noise", "hide"]
    assert list(in_order(reversed(steps))) == list(in_order(steps))
    assert len(set(ON_THE_WAY_OUT)) == len(ON_THE_WAY_OUT)


def test_every_task_passes_a_step_before_the_next_step_begins() -> None:
    seen: list[tuple[str, str]] = []

    class Noted(Step[Sending]):
        def __init__(self, name: str) -> None:
            self.name = name  # type: ignore[misc]

        def out(self, sending: Sending) -> None:
            seen.append((self.name, str(sending.task)))
            sending.updates = f"{sending.updates} {self.name}"  # type: ignore[assignment]

        def snapshot(self) -> dict[str, Any]:
            return {self.name: 1}

        def describe(self) -> dict[str, str]:
            return {self.name: "here"}

    class Inner:
        complete = True
        terms: dict[str, Any] = {}  # noqa: RUF012

        def train(self, tasks: Any) -> Any:
            return [f"of {task}" for task in tasks]

        def snapshot(self) -> Any:
            return {"inner": 0}

        def describe(self) -> Any:
            return {"clients": "inner"}

    clients = SendingClients(Inner(), [Noted("noise"), Noted("clock")])  # type: ignore[arg-type]
    assert clients.train(["a", "b"]) == ["of a clock noise", "of b clock noise"]  # type: ignore[list-item, comparison-overlap]
    assert seen == [("clock", "a"), ("clock", "b"), ("noise", "a"), ("noise", "b")]
    assert clients.snapshot().keys() == {"inner", "clock", "noise"}
    assert clients.describe() == {"clients": "inner", "clock": "here", "noise": "here"}
