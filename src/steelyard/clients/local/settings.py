"""Where and how the clients of a simulation are computed; importing this needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from steelyard.settings import Section

Precision = Literal["float32", "tf32", "bfloat16"]


class ComputeSettings(Section):
    """[compute]: device, engine and limits of the simulation; none of it changes what is computed, only how fast.

    Results of two engines agree within float tolerance; results of one engine with one seed agree bit for bit.
    """

    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""
    engine: str = "auto"
    """auto (chosen by a short trial, kept per model and machine) or one of loop, threads, vmap, graph, fused, winograd,
    stacked; a choice recorded by an earlier run, such as "vmap:50", is taken back as it is."""
    precision: Precision = "float32"
    """float32, tf32 (matrix units of a GPU with shortened mantissas) or bfloat16 (the heavy products only)."""
    memory_gb: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """Most memory that the simulation may plan for on the device; default 70 % of what is free at the start."""
    chunk: PositiveInt | None = None
    """Clients trained in one stack; default as many as the memory allows or as the trial finds fastest."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; default all cores this process may use."""
