"""[algorithm]: which algorithm a federation runs, and its parameters."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import model_validator

from steelyard.algorithms import catalogue
from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.marks import Code
from steelyard.base.settings import Named, read_named, validated
from steelyard.messages.algorithm import Algorithm


class AlgorithmSettings(Named):
    """[algorithm]: an algorithm by name; its own parameters, such as `mu = 0.01`, stand beside the name."""

    name: str = "fedavg"
    """fedavg, fedprox, scaffold, feddyn, fednova, fedavgm, fedadam, fedyogi, fedadagrad, fedexp, client-momentum;
    flexlora for low-rank adapters; with models of the clients' own: local-only, fine-tuned, ditto, apfl, fedrep, fedbn,
    fedala, fedfomo; or one of your own; `steelyard list algorithms` shows them with their parameters."""
    plugins: tuple[Annotated[str, Code()], ...] = ()
    """Python files or modules that define algorithms of your own; loaded before the name is looked up."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        # Code of the user's own is not run while settings are read: such an algorithm is checked when it is made.
        if not self.plugins:
            self.made()
        return self

    def made(self) -> Algorithm:
        """Return the algorithm, after loading the plugins that may define it; a wrong parameter is named."""
        if self.plugins:
            catalogue.load_plugins(self.plugins)
        known = catalogue.known()
        if self.name not in known:
            names = listed(sorted(known))  # not by which module was imported first
            own = "" if self.plugins else "; one of your own: name its file in plugins beside the name"
            raise UserError(f"name: got {brief(self.name)}{nearest(self.name, known)}; allowed: {names}{own}")
        return validated(known[self.name], self.parameters, "")


def algorithm_table(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm as a table: its name with all its parameters; use it where one is sent."""
    return {"name": algorithm.name, **algorithm.model_dump(mode="json")}


def parse_algorithm(text: str) -> AlgorithmSettings | None:
    """Read "scaffold" or "fedprox(mu=0.01)"; None where the text begins with no algorithm's name."""
    if text.partition("(")[0].strip() not in catalogue.known():
        return None
    return validated(AlgorithmSettings, read_named(text, "--rules"), f"--rules: '{text}'")
