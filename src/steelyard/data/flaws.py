"""Clients of unequal worth: what may be wrong with a client, and the `[[flaws]]` sections that say with which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from steelyard.base.errors import UserError, nearest
from steelyard.base.settings import Kinds
from steelyard.data.partition_settings import PartitionSettings, client_name
from steelyard.data.sources.source import Count, DataSettings

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.flawed import FlawedClient

Class = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class FlawSettings(Kinds):
    """One flaw and who has it; use one `[[flaws]]` section for each, applied in the order written.

    Who: `clients` by name, or `pick` with `share` or `count`. What: `kind`, with its `amount`. Only what a client
    trains on and how it behaves is touched: local test sets and the server's rows stay clean and true. A kind is a
    class below this one, with its fields, its words and what it changes.
    """

    told_by: ClassVar[str] = "kind"
    needs_classes: ClassVar[bool] = False
    """Whether it makes no sense for a regression."""
    needs_images: ClassVar[bool] = False
    needs_numbers: ClassVar[bool] = False
    """Whether it makes no sense for tokens of a text."""
    sees_others: ClassVar[bool] = False
    """Whether it sees the updates of all others of the cohort."""
    who: ClassVar[str] = "clients"
    """The field that names clients."""
    kind: str = ""
    """What is wrong with these clients."""
    clients: tuple[str, ...] = ()
    """Ids of the clients that have this flaw, such as client-003."""
    pick: Literal["biggest", "smallest", "random", "same"] | None = None
    """Instead of names. biggest, smallest: the clients with the most or the fewest training rows, counted before any
    flaw (of equal ones the earlier id first); random: clients drawn by the seed, never copies; same: those of the
    section before (after copy the new clients), so that flaws add up."""
    share: Share | None = None
    """pick: this share of all clients, copies not counted; rounded, at least 1, at most those there are to pick."""
    count: Count | None = None
    """pick: so many clients."""
    among: Literal["unflawed", "all"] = "unflawed"
    """pick: from the clients that no earlier section gave a flaw, or from all."""

    @model_validator(mode="after")
    def _who(self) -> Self:
        if self.clients and self.who != "clients":
            raise ValueError(f"clients: got names with kind '{self.kind}'; allowed: {self.who} or pick")
        if bool(self.names) == (self.pick is not None):
            got = f"both {self.who} and pick" if self.names else f"neither {self.who} nor pick"
            raise ValueError(f"pick: got {got}; allowed: one of the two")
        if self.pick is None or self.pick == "same":
            for field in ("share", "count"):
                if getattr(self, field) is not None:
                    how = "without pick" if self.pick is None else "with pick 'same'"
                    raise ValueError(f"{field}: got {getattr(self, field)} {how}; allowed: leave it out")
        elif (self.share is None) == (self.count is None):
            got = "neither" if self.share is None else "both"
            raise ValueError(f"share: got {got} share and count with pick; allowed: one of the two")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The clients named, or the one that is copied; empty with `pick`."""
        return self.clients

    @property
    def named_classes(self) -> Mapping[str, int]:
        """The highest class that each of its fields names."""
        return {}

    @property
    def needs_models(self) -> bool:
        """Whether it looks at the models of rounds that a client may sit out."""
        return False

    def wanted(self, everyone: int) -> int:
        """Return how many of `everyone` clients are to be picked."""
        return self.count if self.count is not None else max(1, math.floor((self.share or 0) * everyone + 0.5))

    def words(self) -> str:
        """Say in a few words what is wrong with a client that has this flaw."""
        raise NotImplementedError

    def change(self, client: FlawedClient) -> None:
        """Give one client the flaw: change its rows, or how it behaves."""
        raise NotImplementedError


class LabelsFlipped(FlawSettings, named="labels-flipped"):
    """Some of its training rows, drawn at random and rounded, have a wrong label."""

    needs_classes: ClassVar[bool] = True
    amount: Share = 1.0
    """Share of its rows."""
    how: Literal["uniform", "pairs", "class"] = "uniform"
    """uniform: any other class, all equally likely; pairs: class c becomes c + 1, the last one 0; class: rows of the
    one class in `classes` become `target`."""
    classes: tuple[Class, ...] = ()
    """By class: the one class that is to be taken for `target`."""
    target: Class | None = None
    """By class: the class that is to be answered. Default 0."""

    @model_validator(mode="after")
    def _one_class(self) -> Self:
        if self.how == "class":
            check_one_class(self.classes, self.target or 0, "class", least=1)
        elif self.classes or self.target is not None:
            field = "classes" if self.classes else "target"
            raise ValueError(f"{field}: got some with how '{self.how}'; allowed with: class")
        return self

    @property
    def named_classes(self) -> Mapping[str, int]:
        return {"classes": self.classes[0], "target": self.target or 0} if self.how == "class" else {}

    def words(self) -> str:
        if self.how == "class":
            return f"class {self.classes[0]} labelled {self.target or 0} ({100 * self.amount:g}%)"
        return f"labels flipped {'in pairs ' if self.how == 'pairs' else ''}({100 * self.amount:g}%)"

    def change(self, client: FlawedClient) -> None:
        chance, labels = client.label_chance(), client.labels.numpy().copy()
        if self.how == "class":
            client.aim(self)
            mine = np.flatnonzero(labels == self.classes[0])
            labels[chance.permutation(mine)[: round(self.amount * len(mine))]] = self.target or 0
        else:
            chosen = chance.permutation(len(labels))[: round(self.amount * len(labels))]
            steps = 1 if self.how == "pairs" else chance.integers(1, client.classes, size=len(chosen))
            labels[chosen] = (labels[chosen] + steps) % client.classes
        client.relabel(labels)


def check_one_class(classes: Sequence[int], target: int, how: str, least: int = 0) -> None:
    """Refuse classes that are not the one that is to be taken for the target."""
    if not least <= len(classes) <= 1:
        raise ValueError(f"classes: got {len(classes)} with how '{how}'; allowed: one class")
    if target in classes:
        raise ValueError(f"classes: got {target}, which is the target too; allowed: another class")


class Noisy(FlawSettings, named="noisy"):
    """Gaussian noise on every number of its training rows.

    Its deviation is `amount` times that of the clients' clean training rows (of each column of a table, of all pixels
    of images). Pixels stay in their range, which is 0 to 255 for bytes, else from the least to the greatest that
    clients train on.
    """

    needs_numbers: ClassVar[bool] = True
    amount: Positive = 1.0
    """Standard deviations."""

    def words(self) -> str:
        return f"noise of {self.amount:g} standard deviation{'' if self.amount == 1 else 's'}"

    def change(self, client: FlawedClient) -> None:
        client.add_noise(self.amount)


class Blurred(FlawSettings, named="blurred"):
    """Its images are blurred by a Gaussian, edge pixels repeated beyond the edge; a mark `sharp` becomes 0."""

    needs_images: ClassVar[bool] = True
    amount: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Sigma in pixels."""

    def words(self) -> str:
        return f"blurred (sigma {self.amount:g})"

    def change(self, client: FlawedClient) -> None:
        client.blur(self.amount)


class Missing(FlawSettings, named="missing"):
    """Some columns (tables) or pixels (images, all channels), drawn once for all its rows, hold nothing.

    That is the column's mean over the clients' clean training rows, or 0 for pixels. A mark `complete` falls by that
    share.
    """

    needs_numbers: ClassVar[bool] = True
    amount: Share = 0.5
    """Share of the columns or pixels, rounded, at least 1."""

    def words(self) -> str:
        return f"features missing ({100 * self.amount:g}%)"

    def change(self, client: FlawedClient) -> None:
        client.blank(self.amount)


class RowsRepeated(FlawSettings, named="rows-repeated"):
    """It keeps some rows, drawn at random, and repeats them until it has as many rows as before."""

    amount: Annotated[float, Field(ge=1)] = 10.0
    """Times that each row is there: it keeps 1/`amount` of them, rounded, at least 1."""

    def words(self) -> str:
        return f"rows repeated {self.amount:g} times"

    def change(self, client: FlawedClient) -> None:
        kept = client.chance.permutation(client.rows)[: max(1, round(client.rows / self.amount))]
        client.take(np.sort(np.resize(kept, client.rows)))


class ClassesMissing(FlawSettings, named="classes-missing"):
    """It loses all training rows of some of the classes it has, never of all; it has fewer rows then."""

    needs_classes: ClassVar[bool] = True
    amount: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of its classes, rounded, at least 1."""
    classes: tuple[Class, ...] = ()
    """The classes that all clients of this section lose, in place of some drawn for each by itself."""

    @property
    def named_classes(self) -> Mapping[str, int]:
        return {"classes": max(self.classes)} if self.classes else {}

    def words(self) -> str:
        named = ", ".join(map(str, self.classes))
        return f"classes {named} missing" if named else f"classes missing ({100 * self.amount:g}%)"

    def change(self, client: FlawedClient) -> None:
        labels = client.labels.numpy()
        present = np.unique(labels)
        count = min(max(1, round(self.amount * len(present))), len(present) - 1)
        missing = np.array(self.classes) if self.classes else client.chance.permutation(present)[:count]
        rows = np.flatnonzero(~np.isin(labels, missing))
        if not len(rows):
            raise UserError(
                f"flaws.classes: {self.words()} leaves {client.name} without a row; allowed: classes beside which it "
                "has others"
            )
        client.take(rows)


class FewSteps(FlawSettings, named="few-steps"):
    """Each round it trains on some of its rows only, drawn anew, but reports all."""

    amount: Share = 0.1
    """Share of its rows, rounded, at least 1."""

    def words(self) -> str:
        return f"few steps ({100 * self.amount:g}% of the rows)"

    def change(self, client: FlawedClient) -> None:
        client.behave(work=self.amount)


class Stale(FlawSettings, named="stale"):
    """It starts from the global model of some rounds ago (before that many rounds: from the first model)."""

    amount: Count = 5
    """Rounds."""

    @property
    def needs_models(self) -> bool:
        return True

    def words(self) -> str:
        return f"model {self.amount} round{'' if self.amount == 1 else 's'} old"

    def change(self, client: FlawedClient) -> None:
        client.behave(stale=self.amount)


class OwnModel(FlawSettings, named="own-model"):
    """It ignores the model it receives and goes on training its own."""

    def words(self) -> str:
        return "trains its own model"

    def change(self, client: FlawedClient) -> None:
        client.behave(own_model=True)


class Copy(FlawSettings, named="copy"):
    """Not a fault of a client but one more client, with the training and test rows that another has at this point.

    It is numbered after the others (people: NAME-copy-0, NAME-copy-1), and further flaws can name it.
    """

    who: ClassVar[str] = "of"
    of: str | None = None
    """Id of the client whose rows are copied."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.of,) if self.of else ()


class FreeRider(FlawSettings, named="free-rider"):
    """It does not train and returns the model it received, pretending to have done all steps."""

    how: Literal["plain", "colluding"] = "plain"
    """plain: the model it received; colluding: all of them repeat the last step of the global model, each with a little
    noise."""

    @property
    def needs_models(self) -> bool:
        return self.how == "colluding"

    def words(self) -> str:
        return "colluding free rider" if self.how == "colluding" else "free rider"

    def change(self, client: FlawedClient) -> None:
        client.behave(free_rider=True, pretends=self.how == "colluding")


class Claims(FlawSettings):
    """It reports other numbers than are true."""

    from_round: Count | None = None
    """The round in which the lies begin. Default 1."""

    @property
    def _since(self) -> str:
        return "" if self.from_round is None else f" from round {self.from_round}"


class ClaimsSize(Claims, named="claims-size"):
    """It reports a wrong number of samples, in the criterion DS too."""

    amount: Positive = 10.0
    """Times its number of samples."""

    def words(self) -> str:
        return f"claims {self.amount:g} times its size{self._since}"

    def change(self, client: FlawedClient) -> None:
        client.behave(claims=self.amount, lies_from=self.from_round or 1)


class ClaimsCriteria(Claims, named="claims-criteria"):
    """Of every criterion that it measures itself it reports the most that can be true.

    LE 1, LD the number of classes; where there is no such, `amount` times what is true, of its number of samples too.
    """

    amount: Positive = 1000.0
    """Times what is true."""

    def words(self) -> str:
        return f"inflates its criteria{self._since}"

    def change(self, client: FlawedClient) -> None:
        client.behave(claims=self.amount, inflates=self.amount, lies_from=self.from_round or 1)


def check_flaws(data: DataSettings, partition: PartitionSettings, flaws: Sequence[FlawSettings]) -> None:
    """Refuse flaws that this source or partition can never have; call it before any data is read."""
    for index, flaw in enumerate(flaws):
        if flaw.pick == "same" and index == 0:
            raise UserError("flaws.0.pick: got 'same' in the first section; allowed: biggest, smallest, random")
        if flaw.needs_classes and data.capabilities().task not in (None, "classes"):
            raise UserError(
                f"flaws.{index}.kind: got '{flaw.kind}' with data.source '{data.source}'; "
                "allowed: kinds without classes (this data has none)"
            )
    count = partition.client_count
    if flaws and partition.counted and count is not None:
        _check_names(flaws, count)


def _check_names(flaws: Sequence[FlawSettings], count: int) -> None:
    known = [client_name(number, count) for number in range(count)]
    chosen = 0
    for index, flaw in enumerate(flaws):
        for name in flaw.names:
            if name not in known:
                raise UserError(
                    f"flaws.{index}.{flaw.who}: got '{name}'{nearest(name, known)}; allowed: {known[0]} to {known[-1]}"
                )
        if flaw.count is not None and flaw.count > count:
            raise UserError(f"flaws.{index}.count: got {flaw.count}; allowed: at most {count}, all clients")
        if flaw.pick != "same":
            chosen = len(flaw.names) or min(flaw.wanted(count), count)
        if isinstance(flaw, Copy):
            known += [client_name(len(known) + number, count) for number in range(chosen)]
