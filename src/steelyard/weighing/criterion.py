"""Criteria: raw measures of a client's worth, each saying who takes it, what it is about and what it needs.

A criterion that the client measures is believed as sent (after a check of its range); one that the server measures
cannot be lied about. The built-in ones are in `builtin`, AdaFed's measured performance (VP and its kin) in `adafed`.
A criterion of your own is one decorated function:

    @client_criterion("BT", about="device", description="battery level")
    def battery(local: LocalData) -> float:
        return local.device.get("battery", 1.0)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, Strict

from steelyard.base.errors import UserError, brief, expect, listed
from steelyard.base.settings import LARGEST_REAL, Section, validated
from steelyard.base.usercode import CRITERIA, Registry, is_ours, origin
from steelyard.messages.updates import Floats
from steelyard.weighing.cohort import CohortView as CohortView
from steelyard.weighing.cohort import Labelled as Labelled
from steelyard.weighing.cohort import LocalData as LocalData
from steelyard.weighing.fact import read_fact

MeasuredBy = Literal["client", "server"]
About = Literal["data", "model", "device", "user"]
NeededTask = Literal["classes", "regression", "survival", "segmentation", "multi-label"]
Task = NeededTask | Literal["ranking"]
ClientMeasure = Callable[[LocalData], float | bool]
ServerMeasure = Callable[[CohortView], Floats]
MeasureT = TypeVar("MeasureT", ClientMeasure, ServerMeasure)


class Needs(Section):
    """What must be there for a criterion to be measured, or a policy to weigh; a run that cannot give it refuses it.

    >>> steelyard.Needs(labels=True, classes=2).classes
    2

    Raises:
        UserError: a need is unknown, or its value is none that it can have.
    """

    model_config = ConfigDict(strict=True)

    labels: bool = False
    """Whether clients must have labels."""
    classes: int | None = Field(default=None, ge=1)
    """The number of classes that it is made for; None for any number, and for criteria that look at no classes."""
    marks: Annotated[tuple[str, ...], Strict(strict=False)] = ()
    """Attributes that every training sample must have, such as "sharp"."""
    task: NeededTask | None = None
    """The kind of task that it is made for; None for any."""
    models: bool = False
    """Whether the server must see the updates of single clients; secure aggregation hides them."""
    test_set: bool = False
    """Whether the server must hold a test set of its own."""
    label_counts: bool = False
    """Whether clients must send the server how many samples of each class they have."""
    first_losses: bool = False
    """Whether clients must measure the loss of the received model before they train: one more pass over their data."""
    slopes: bool = False
    """Whether the server must be able to learn from rows of its own: the slope of its loss."""
    layers: bool = False
    """Whether the server must know which parameters are which layer of the network."""
    everyone: bool = False
    """Whether every client must take part in every round."""
    client_tests: bool = False
    """Whether clients must test models on rows of their own in every round."""
    noise: bool = False
    """Whether clients must add noise to their steps, so that single samples are protected."""
    expertise: bool = False
    """Whether clients must be users who know which features of items drive their choices."""


NO_NEEDS = Needs()
SINGLE_MODELS = Needs(models=True)
NEEDS = {
    "noise": (
        "noise in clients' steps",
        "looks at the noise that clients add to protect samples, and here they add none; allowed: experiments with "
        "[privacy.records]",
    ),
    "expertise": ("", "looks at users' features, and {name} has none; allowed: kind = 'recommend' with [kgflex]"),
    "labels": ("", "looks at labels, and {name} has none; allowed: data with labels"),
    "test_set": ("rows at the server", "is measured on the server's test set, {lacks_test_set}"),
    "slopes": (
        "a server that learns from them",
        "learns from the server's rows, and {name} only tests on them; allowed: rules that do not",
    ),
    "models": (
        "single updates",
        "looks at single updates, and {name} hides them; allowed: criteria that clients measure",
    ),
    "layers": (
        "the network's layers",
        "looks at single layers, and {name} does not name them; allowed: rules that do not",
    ),
    "label_counts": (
        "label counts",
        "looks at label counts, and {name} does not give them; allowed: criteria that do not",
    ),
    "first_losses": (
        "losses before training",
        "looks at losses before training, and {name} has none; allowed: criteria that do not",
    ),
    "everyone": (
        "full participation",
        "needs full participation, and rounds may be without some clients; allowed: rounds.fraction = 1 "
        "without rounds.select.available and clock.deadline",
    ),
    "client_tests": (
        "clients that test models",
        "has clients test models in every round; allowed: partition.test with rows, rounds.evaluate_every = 1",
    ),
}
"""Needs that are met or not: what lists call each (nothing where they leave it out), and how a run without it refuses
it."""
TASKS: dict[Task, tuple[str, str]] = {
    "classes": ("measures classes", "has classes"),
    "regression": ("measures the error of a regression", "is a regression"),
    "survival": ("measures the order of times to an event", "has times to an event"),
    "segmentation": ("measures masks", "has masks"),
    "multi-label": ("measures several labels of a row", "has several labels for a row"),
    "ranking": ("ranks items", "ranks items"),
}
"""What a criterion for a task does, and what data of that task are."""


@dataclass(frozen=True)
class Capabilities:
    """What a run can give; None where only the data can tell, which is then found out when a criterion is measured."""

    name: str
    """What gives it, for error lines: "data.source = 'digits'"."""
    task: Task | None = None
    classes: int | None = None
    """Number of classes; 0 where there are none."""
    marks: frozenset[str] | None = None
    labels: bool = True
    models: bool = True
    lacks_test_set: str = ""
    """Why the server has no rows to test on, and what is allowed; empty where it has some."""
    label_counts: bool = True
    first_losses: bool = True
    slopes: bool = True
    layers: bool = True
    everyone: bool = True
    client_tests: bool = True
    expertise: bool = False
    noise: bool = False

    @property
    def test_set(self) -> bool:
        """Whether the server has rows to test on."""
        return not self.lacks_test_set


def unmet(needs: Needs, available: Capabilities, known: Mapping[str, Needs]) -> str | None:
    """Say what of the needs is not met and what is allowed in its place, or None when everything is.

    `known` are the needs of the criteria that could be used in its place, by name.
    """
    name = available.name
    if needs.classes is not None and available.classes not in (None, needs.classes):
        found = f"has {available.classes}" if available.classes else "has no classes"
        return f"is for {needs.classes} classes, and {name} {found}; allowed: data with {needs.classes} classes"
    if needs.task is not None and available.task not in (None, needs.task):
        alike = {criterion: other for criterion, other in known.items() if other.test_set == needs.test_set}
        instead = [criterion for criterion, other in alike.items() if other.task == available.task]
        return (
            f"{TASKS[needs.task][0]}, and {name} {TASKS[available.task][1]}; "
            f"allowed: {listed(instead) or 'criteria for any task'}"
        )
    for mark in needs.marks:
        if available.marks is not None and mark not in available.marks:
            return (
                f"needs samples marked {mark}, and {name} has none; allowed: a source with that mark "
                "(images, npz or csv with data.marks, or memory)"
            )
    for need, (_, refusal) in NEEDS.items():
        if getattr(needs, need) and not getattr(available, need):
            return refusal.format(name=name, lacks_test_set=available.lacks_test_set)
    return None


class CriterionFault(UserError):
    """A measure of the user's own fails at the server; whoever knows round and rule adds them."""


class Criterion(Section):
    """One measure of a client's worth; build it with `client_criterion` or `server_criterion`."""

    model_config = ConfigDict(strict=True)

    name: str
    measured_by: MeasuredBy
    about: About = "data"
    description: str = ""
    measure: ClientMeasure | ServerMeasure
    maximum: float | None = Field(default=None, gt=0, le=LARGEST_REAL)
    """Largest raw value that can be true; a client that sends more is refused. The smallest is always 0. Other bounds
    on what a client says of itself belong beside it, and into `refusal`, which the server asks for every client."""
    needs: Needs = NO_NEEDS
    """What must be there for it to be measured."""
    of_labels: Callable[[Labelled], Floats | None] | None = None
    """The same measure of many clients at once, where it looks at labels alone; None from it means: one by one."""
    at_most_classes: bool = False
    """Whether it counts classes, so that it cannot be above their number; a client that sends more is refused."""
    uses_claims: bool = False
    """Whether a measure of the server also looks at what clients say of themselves, such as their number of samples."""
    of_one: bool = True
    """Whether a client's value follows from that client alone; agreement with others, for one, does not."""

    @property
    def built_in(self) -> bool:
        """Whether the measure is the library's own; code of users gets copies of what it looks at."""
        return is_ours(self.measure)

    def on_client(self, local: LocalData) -> float:
        """Take a client-side measure as a number; booleans become 0 or 1."""
        needed, classes = self.needs.classes, local.classes
        if needed is not None or self.needs.marks:
            # Fewer classes are no fault: a device that holds one class only may not know of the other.
            known = needed if needed is not None and 0 < classes < needed else classes
            check(self, Capabilities("this data", classes=known, marks=frozenset(local.marks)))
        return float(self.measure(local))  # type: ignore[arg-type]

    def taken(self, local: LocalData) -> tuple[float, str | None]:
        """Take a client-side measure; where it fails or cannot be, return nan and the reason to leave the client out.

        What the experiment got wrong for every client, such as data without a needed mark, still raises.
        """
        try:
            value = self.on_client(local)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            return math.nan, " ".join(f"criterion {self.name} failed: {type(error).__name__}: {error}".split())
        why = self.refusal(value)
        return (value, None) if why is None else (math.nan, why)

    def on_server(self, view: CohortView) -> Floats:
        """Take a server-side measure of the whole cohort: one number for each client."""
        counts, losses = view.label_counts is not None, view.first_losses is not None
        noise = view.noise is not None
        check(self, Capabilities("this cohort", label_counts=counts, first_losses=losses, noise=noise))
        try:
            found = np.array(self.measure(view), dtype=np.float64)  # type: ignore[arg-type]
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if self.built_in:
                raise  # a fault of ours is not one of the user's
            raise CriterionFault(
                f"criterion {self.name}: fails on the server: {type(error).__name__}: {error}; allowed: a number >= 0 "
                "for each client"
            ) from error
        if found.shape != np.shape(view.samples):
            raise CriterionFault(
                f"criterion {self.name}: measured shape {found.shape} on the server; allowed: a number >= 0 for each "
                f"of the {len(view.samples)} clients"
            )
        wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
        if len(wrong):
            names = view.clients or tuple(map(str, range(len(found))))
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CriterionFault(
                f"criterion {self.name}: measured {found[wrong[0]]} on the server for {names[wrong[0]]}{more}; "
                "allowed: a number >= 0 for each client"
            )
        return found

    def most(self, classes: int | None = None) -> float:
        """Return the largest raw value that can be true, in a task with that many classes where they are known."""
        top = math.inf if self.maximum is None else self.maximum
        return min(top, classes) if self.at_most_classes and classes else top

    def refusal(self, value: float, classes: int | None = None) -> str | None:
        """Say why a value sent by a client cannot be true, or None when it can."""
        top = self.most(classes)
        if np.isfinite(value) and 0 <= value <= top:
            return None
        return f"criterion {self.name} = {value}; allowed: 0 to {'any finite number' if top == np.inf else top}"


_registry: Registry[Criterion] = Registry("criterion", CRITERIA, lambda criterion: origin(criterion.measure))
"""The criteria that each plugin registered when it was loaded."""


def client_criterion(
    name: str,
    *,
    about: About = "data",
    description: str = "",
    maximum: float | None = None,
    needs: Needs = NO_NEEDS,
    of_labels: Callable[[Labelled], Floats | None] | None = None,
    at_most_classes: bool = False,
    **unknown: object,
) -> Callable[[ClientMeasure], ClientMeasure]:
    """Register a function of LocalData as a criterion that each client measures on itself.

    What it needs, such as `needs=Needs(marks=("sharp",))`, is compared with what the data can give before a run starts.
    `of_labels` may give the same for many clients at once; a simulation of thousands then measures faster.
    The function gets one client's `LocalData` and returns a number from 0 on, or true or false.

        >>> @steelyard.client_criterion("ROWS", maximum=1000, description="rows, up to 1000")
        ... def rows(local: steelyard.LocalData) -> float: return min(len(local.labels), 1000)

    Raises:
        UserError: the name is taken or no word, an argument is none, or what is decorated is no function.
    """
    given = {"about": about, "maximum": maximum, "of_labels": of_labels, "at_most_classes": at_most_classes}
    return _registering("client", name, description, needs, given, unknown)


def server_criterion(
    name: str,
    *,
    about: About = "model",
    description: str = "",
    maximum: float | None = None,
    needs: Needs = SINGLE_MODELS,
    uses_claims: bool = False,
    of_one: bool = False,
    **unknown: object,
) -> Callable[[ServerMeasure], ServerMeasure]:
    """Register a function of CohortView as a criterion that the server measures, so that no client can lie about it.

    Without `needs` it is taken to look at single updates; with it, at what it names alone. What costs clients something
    is asked of them only where a criterion needs it: `Needs(label_counts=True)` makes `view.label_counts` not None,
    `first_losses` makes `view.first_losses` not None; `test_set` and `slopes` are for `view.root`, what the server
    learns from rows of its own, `layers` for `view.kernel_norms`. Say `uses_claims`
    where the measure looks at what clients say of themselves (samples, label counts, losses): it is no truer than they
    are. Say `of_one` where a client's value follows from that client alone, and `maximum` where none can be larger:
    noise for privacy can cover no other measures. The function gets the cohort's `CohortView` and returns an array
    [clients] of numbers from 0 on.

        >>> @steelyard.server_criterion("NEAR", description="how near the model stays")
        ... def near(view: steelyard.CohortView): return 1 / (1 + view.divergence)

    Raises:
        UserError: the name is taken or no word, an argument is none, or what is decorated is no function.
    """
    given = {"about": about, "maximum": maximum, "uses_claims": uses_claims, "of_one": of_one}
    return _registering("server", name, description, needs, given, unknown)


def _registering(
    measured_by: MeasuredBy,
    name: str,
    description: str,
    needs: Needs,
    given: Mapping[str, object],
    unknown: Mapping[str, object],
) -> Callable[[MeasureT], MeasureT]:
    """Return the decorator that puts a function into the registry as a criterion; what does not fit is one line."""
    where = f"@{measured_by}_criterion"
    # A decorator without parentheses gets the function as its name.
    expect(where, name, str, f'{where}("NAME"), with the name of the criterion in parentheses')
    expect(f"{where}: description", description, str, "text")
    for keyword in unknown:
        raise UserError(f"{where}: {keyword}: unknown argument; allowed: {listed(['description', 'needs', *given])}")
    expect(f"{where}: needs", needs, Needs, "Needs(...), such as needs=Needs(labels=True)")
    claims = {"uses_claims": True} if needs.label_counts or needs.first_losses else {}

    def register(measure: MeasureT) -> MeasureT:
        _check_measure(f'{where}("{name}")', measure)
        text = description or (measure.__doc__ or name).strip().splitlines()[0]
        said = {"name": name, "measured_by": measured_by, "description": text, "measure": measure, "needs": needs}
        add(validated(Criterion, {**given, **claims, **said}, where))
        return measure

    return register


def add(criterion: Criterion) -> None:
    """Put a criterion into the registry; a name that is taken by another function is refused."""
    if not criterion.name or not criterion.name.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"criterion name '{criterion.name}': allowed: letters, digits, '-' and '_'")
    _registry.add(criterion.name, criterion)


def load_plugins(sources: Sequence[str]) -> None:
    """Make the criteria of these scripts or modules known, and no longer those of other plugins."""
    _registry.load(sources)


def known() -> dict[str, Criterion]:
    """Return all registered criteria by name: built in, from entry points, from loaded scripts."""
    return _registry.known()


def find(name: str) -> Criterion | None:
    """Return the criterion of that name, a registered one or a fact; None where there is none."""
    return known().get(name) or _of_fact(name)


def get(name: str) -> Criterion:
    """Return the criterion of that name, or say which names there are."""
    return _of_fact(name) or _registry.get(name)


def _of_fact(name: str) -> Criterion | None:
    """Return the criterion of a fact, "fact(age=65..)"; None for other names."""
    fact = read_fact(name)
    if fact is None:
        return None
    most = 1.0 if fact.asked or fact.scaled else None
    about = fact.about or "user"  # of a fact that may be either, as one that is about a person
    return Criterion(
        name=name,
        measured_by="client",
        about=about,
        description=f"fact about the user, the device or its rows: {fact}",
        measure=fact,
        maximum=most,
    )


def check(criterion: Criterion, available: Capabilities) -> None:
    """Refuse a criterion whose needs the run does not meet; call it before any data is read."""
    fault = unmet(criterion.needs, available, {name: other.needs for name, other in known().items()})
    if fault is not None:
        raise UserError(f"weighing.criteria: {criterion.name} {fault}")


def _check_measure(where: str, measure: object) -> None:
    """Refuse what is no function of one argument."""
    wrong = "" if callable(measure) else brief(measure)
    try:
        if callable(measure):
            inspect.signature(measure).bind(None)
    except ValueError:
        pass  # written in C: what it takes shows when it is called
    except TypeError as error:
        wrong = f"{brief(measure)} ({error})"
    if wrong:
        raise UserError(f"{where}: got {wrong}; allowed: a function of one argument")
