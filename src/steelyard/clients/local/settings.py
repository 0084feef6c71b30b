"""Where and how the clients of a simulation are computed; importing this needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from steelyard.base.settings import Section

Precision = Literal["float32", "tf32", "bfloat16"]


class ComputeSettings(Section):
    """[compute]: device, engine and limits of the simulation; none of it changes what is computed, only how fast.

    Results of two engines agree within float tolerance; results of one engine with one seed agree bit for bit.

        >>> ComputeSettings(device="cpu", engine="loop").engine
        'loop'

    Raises:
        UserError: a field is unknown or holds what it does not take.
    """

    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""
    engine: str = "auto"
    """auto (chosen by a short trial, kept per model and machine) or one of loop, threads, processes, stacked, fused.
    The last two take a kind of step ("stacked/vmap"), and stacks a number of clients: a choice recorded by an earlier
    run, such as "stacked/vmap:50", is taken back as it is."""
    precision: Precision = "float32"
    """float32, tf32 (matrix units of a GPU with shortened mantissas) or bfloat16 (the heavy products only)."""
    memory_gb: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """Most memory that the simulation may plan for on the device; default 70 % of what is free at the start."""
    chunk: PositiveInt | None = None
    """Clients trained in one stack; default as many as the memory allows or as the trial finds fastest."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; default all cores this process may use."""


class ClockSettings(Section):
    """[clock]: simulated seconds. How long each device takes in a round, and what becomes of those that are late.

    The first three are what a device has where `[facts.device]` gives it no fact of that name.
    """

    sample_seconds: PositiveFloat = 0.01
    """Seconds that a device takes to train on one sample once."""
    download: PositiveFloat = 1e6
    """Bytes that a device receives in a second."""
    upload: PositiveFloat = 250_000.0
    """Bytes that a device sends in a second."""
    stragglers: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the clients, drawn anew in each round, that take `slowdown` times as long to train and to send."""
    slowdown: Annotated[float, Field(ge=1)] = 10.0
    """How many times as long a straggler takes."""
    deadline: PositiveFloat | None = None
    """Seconds after which a round ends without those that are late; default: it waits for the slowest."""
    late: Literal["drop", "next"] = "drop"
    """What becomes of a late update: drop: nothing; next: it joins the next round, with its weight discounted."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.5
    """What the weight of an update that joins the next round is multiplied by, before weights sum to 1 again."""

    @model_validator(mode="after")
    def _waits_for_nobody(self) -> Self:
        if self.late == "next" and self.deadline is None:
            raise ValueError("late: got 'next' without deadline, so that nobody is late; allowed: with clock.deadline")
        return self
