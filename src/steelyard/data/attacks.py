"""Malicious clients: the kinds of `[[flaws]]` whose clients send another update than theirs, or teach a backdoor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from steelyard.data.flaws import Class, FlawSettings, Positive, Share, check_one_class
from steelyard.data.sources.source import Count

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.flawed import FlawedClient


class Attack(FlawSettings):
    """Malicious clients, which send another update than theirs; docs/reference/defence.md has the formulas.

    u is their own, μ and σ the mean and standard deviation of the honest updates of the cohort, by coordinate.
    """

    from_round: Count | None = None
    """The round in which the attack begins, before which they behave. Default 1."""

    def change(self, client: FlawedClient) -> None:
        self.send(client, attack=self.kind, strength=getattr(self, "amount", 1.0), target=0)

    def send(self, client: FlawedClient, **changes: Any) -> None:
        """Let a client attack in this way from its round on."""
        client.behave(**changes, attacks_from=self.from_round or 1)


class Reversed(Attack, named="reversed"):
    """−`amount` · u."""

    amount: Positive = 1.0
    """Times its own update."""

    def words(self) -> str:
        return f"update reversed, {self.amount:g} times"


class Gaussian(Attack, named="gaussian"):
    """Normal noise, `amount` times as large as u."""

    amount: Positive = 10.0
    """Times the size of its own update."""

    def words(self) -> str:
        return f"update of noise, {self.amount:g} times"


class Alie(Attack, named="alie"):
    """μ − `amount` · σ."""

    sees_others: ClassVar[bool] = True
    amount: Positive = 1.5
    """Standard deviations."""

    def words(self) -> str:
        return f"ALIE ({self.amount:g} standard deviations)"


class Ipm(Attack, named="ipm"):
    """−`amount` · μ."""

    sees_others: ClassVar[bool] = True
    amount: Positive = 2.0
    """Times the mean update."""

    def words(self) -> str:
        return f"IPM ({self.amount:g} times)"


class MinMax(Attack, named="min-max"):
    """μ − γσ with the greatest γ that is no further from any honest update than two of them are."""

    sees_others: ClassVar[bool] = True

    def words(self) -> str:
        return "min-max"


class MinSum(Attack, named="min-sum"):
    """μ − γσ with the greatest γ whose squared distances to honest updates sum to no more than those of one of them."""

    sees_others: ClassVar[bool] = True

    def words(self) -> str:
        return "min-sum"


class Mimic(Attack, named="mimic"):
    """All send the update of the honest client that stands out most where honest updates differ most."""

    sees_others: ClassVar[bool] = True

    def words(self) -> str:
        return "mimic"


class Decoy(Attack, named="decoy"):
    """The first sends a huge update along a random direction, the others a sliver of it and `amount` times their mean.

    They need no update but their own. Who looks for what stands out finds the decoy, and behind it the others.
    """

    sees_others: ClassVar[bool] = True
    amount: Positive = 30.0
    """Times the mean of their own updates."""

    def words(self) -> str:
        return f"decoy with a payload of {self.amount:g} times"


class Drift(Attack, named="drift"):
    """u turned a little towards the model's own negative, round by round the same way, and no longer than before."""

    amount: Positive = 0.5
    """How much of that direction is added to u, in lengths of u."""

    def words(self) -> str:
        return f"slow drift ({self.amount:g})"


class Neurotoxin(Attack, named="neurotoxin"):
    """u without the parameters that honest clients move most; use it after backdoor, with pick = "same"."""

    sees_others: ClassVar[bool] = True
    amount: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the parameters that it leaves alone."""

    def words(self) -> str:
        return f"leaves {self.amount:.0%} of the parameters alone"


class Adaptive(Attack, named="adaptive"):
    """It knows the rule; each round all such clients try it on about 200 candidates and send the worst."""

    sees_others: ClassVar[bool] = True
    how: Literal["all", "alie", "ipm", "drift", "roles", "decoys", "copies", "hidden", "bait", "insider"] = "all"
    """Which candidates are tried: all, or alie, ipm, drift or those with roles alone, or of these one kind; insider:
    all, on the rows on which the server weighs."""

    def words(self) -> str:
        return f"adaptive ({self.how})"

    def change(self, client: FlawedClient) -> None:
        self.send(client, attack="adaptive", family=self.how)


class Boosted(Attack, named="boosted"):
    """`amount` · n/m · u, n clients of which m do so, to replace the model.

    Use it after backdoor or labels-flipped, with pick = "same".
    """

    amount: Positive = 1.0
    """1: as much as replaces the model."""

    def words(self) -> str:
        return f"boosted to replace the model{'' if self.amount == 1 else f', {self.amount:g} times'}"


class Bias(Attack, named="bias"):
    """u, and `amount` times its length on the bias of the class `target`."""

    needs_classes: ClassVar[bool] = True
    amount: Positive = 1.0
    """Times the length of its own update."""
    target: Class = 0
    """The class that is to be answered."""

    @property
    def named_classes(self) -> Mapping[str, int]:
        return {"target": self.target}

    def words(self) -> str:
        return f"bias of class {self.target} pushed, {self.amount:g} times"

    def change(self, client: FlawedClient) -> None:
        self.send(client, attack="bias", strength=self.amount, target=self.target)


class BackdoorTaught(FlawSettings, named="backdoor"):
    """Some of its training rows have the class `target` and a mark that stands for it."""

    needs_classes: ClassVar[bool] = True
    needs_images: ClassVar[bool] = True
    amount: Share = 0.5
    """Share of its rows."""
    how: Literal["pixels", "distributed", "semantic"] = "pixels"
    """pixels: a bright square in the corner; distributed: each client teaches a quarter of it, tests show the whole;
    semantic: unchanged images, the brightest quarter of the one class in `classes` (default: the one after `target`),
    in place of `amount` of its rows."""
    classes: tuple[Class, ...] = ()
    """Semantic: the one class that is to be taken for `target`."""
    target: Class = 0
    """The class that is to be answered."""

    @model_validator(mode="after")
    def _one_class(self) -> Self:
        if self.how == "semantic":
            check_one_class(self.classes, self.target, "semantic")
        elif self.classes:
            raise ValueError(f"classes: got some with how '{self.how}'; allowed with: semantic")
        return self

    @property
    def named_classes(self) -> Mapping[str, int]:
        return {"target": self.target, **({"classes": self.classes[0]} if self.classes else {})}

    def words(self) -> str:
        kind = "" if self.how == "pixels" else f"{self.how} "
        return f"{kind}backdoor to class {self.target} ({100 * self.amount:g}% of the rows)"

    def change(self, client: FlawedClient) -> None:
        client.aim(self)
        client.teach(self)


OMNISCIENT: frozenset[str] = frozenset(
    name for name, kind in FlawSettings.kinds.items() if getattr(kind, "sees_others", False)
)
"""Attacks whose clients see the updates of all others of the cohort."""
