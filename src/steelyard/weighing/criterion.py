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
from typing import Any, Literal, get_args

import numpy as np

from steelyard.base.errors import UserError, brief, expect, listed, texts_of
from steelyard.base.settings import LARGEST_REAL
from steelyard.base.usercode import CRITERIA, Registry, is_ours
from steelyard.messages.updates import Floats
from steelyard.weighing.cohort import CohortView as CohortView
from steelyard.weighing.cohort import Labelled as Labelled
from steelyard.weighing.cohort import LocalData as LocalData

MeasuredBy = Literal["client", "server"]
About = Literal["data", "model", "device", "user"]
NeededTask = Literal["classes", "regression", "survival", "segmentation", "multi-label"]
Task = NeededTask | Literal["ranking"]


@dataclass(frozen=True)
class Needs:
    """What must be there for a criterion to be measured, or a policy to weigh; a run that cannot give it refuses it."""

    labels: bool = False
    """Whether clients must have labels."""
    classes: int | None = None
    """The number of classes that it is made for; None for any number, and for criteria that look at no classes."""
    marks: tuple[str, ...] = ()
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
    expertise: bool = False
    """Whether clients must be users who know which features of items drive their choices."""


NO_NEEDS = Needs()


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


def unmet(needs: Needs, available: Capabilities, known: Mapping[str, Needs]) -> str | None:
    """Say what of the needs is not met and what is allowed in its place, or None when everything is.

    `known` are the needs of the criteria that could be used in its place, by name.
    """
    return (
        _unmet_by_task(needs, available, known)
        or _unmet_by_rows(needs, available)
        or _lacking(needs, available)
        or None
    )


def _unmet_by_task(needs: Needs, available: Capabilities, known: Mapping[str, Needs]) -> str:
    if needs.classes is not None and available.classes not in (None, needs.classes):
        found = f"has {available.classes}" if available.classes else "has no classes"
        return (
            f"is for {needs.classes} classes, and {available.name} {found}; allowed: data with {needs.classes} classes"
        )
    if needs.task is None or available.task in (None, needs.task):
        return ""
    measures = {
        "classes": "measures classes",
        "regression": "measures the error of a regression",
        "survival": "measures the order of times to an event",
        "segmentation": "measures masks",
        "multi-label": "measures several labels of a row",
    }[needs.task]
    task = {
        "classes": "has classes",
        "regression": "is a regression",
        "survival": "has times to an event",
        "segmentation": "has masks",
        "multi-label": "has several labels for a row",
        "ranking": "ranks items",
    }[available.task]
    alike = {name: other for name, other in known.items() if other.test_set == needs.test_set}
    instead = [name for name, other in alike.items() if other.task == available.task]
    return f"{measures}, and {available.name} {task}; allowed: {listed(instead) or 'criteria for any task'}"


def _unmet_by_rows(needs: Needs, available: Capabilities) -> str:
    """Say which marks of samples, or which rows of the server, are not there."""
    for mark in needs.marks:
        if available.marks is not None and mark not in available.marks:
            return (
                f"needs samples marked {mark}, and {available.name} has none; allowed: a source with that mark "
                "(images, npz or csv with data.marks, or memory)"
            )
    lacking = needs.test_set and available.lacks_test_set
    return f"is measured on the server's test set, {available.lacks_test_set}" if lacking else ""


def _lacking(needs: Needs, available: Capabilities) -> str:
    """Say what of the needs that are either met or not is not met."""
    name = available.name
    if needs.expertise and not available.expertise:
        return f"looks at users' features, and {name} has none; allowed: kind = 'recommend' with [kgflex]"
    if needs.labels and not available.labels:
        return f"looks at labels, and {name} has none; allowed: data with labels"
    if needs.models and not available.models:
        return f"looks at single updates, and {name} hides them; allowed: criteria that clients measure"
    if needs.label_counts and not available.label_counts:
        return f"looks at label counts, and {name} does not give them; allowed: criteria that do not"
    if needs.first_losses and not available.first_losses:
        return f"looks at losses before training, and {name} has none; allowed: criteria that do not"
    if needs.slopes and not available.slopes:
        return f"learns from the server's rows, and {name} only tests on them; allowed: rules that do not"
    if needs.layers and not available.layers:
        return f"looks at single layers, and {name} does not name them; allowed: rules that do not"
    if needs.everyone and not available.everyone:
        return (
            "needs full participation, and rounds may be without some clients; allowed: rounds.fraction = 1 "
            "without rounds.select.available and clock.deadline"
        )
    if needs.client_tests and not available.client_tests:
        return "has clients test models in every round; allowed: partition.test with rows, rounds.evaluate_every = 1"
    return ""


class CriterionFault(UserError):
    """A measure of the user's own fails at the server; whoever knows round and rule adds them."""


@dataclass(frozen=True)
class Criterion:
    """One measure of a client's worth; build it with `client_criterion` or `server_criterion`."""

    name: str
    measured_by: MeasuredBy
    about: About
    description: str
    measure: Callable[[LocalData], float | bool] | Callable[[CohortView], Floats]
    maximum: float | None = None
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
        needed = self.needs.classes
        # Fewer are no fault: a device that holds one class only may not know of the other.
        if needed is not None and not 0 < local.classes <= needed:
            raise UserError(
                f"criterion {self.name}: is for {needed} classes, and this data has {local.classes or 'none'}; "
                f"allowed: data with {needed} classes"
            )
        for mark in self.needs.marks:
            if mark not in local.marks:
                raise UserError(
                    f"criterion {self.name}: this data has no mark '{mark}'; allowed: a source with that mark"
                )
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
        for need, sent, what in (
            (self.needs.label_counts, view.label_counts, "how many samples of each class they have"),
            (self.needs.first_losses, view.first_losses, "the loss of the model they received"),
        ):
            if need and sent is None:
                raise UserError(
                    f"criterion {self.name}: clients do not send {what}; allowed: criteria that do not need it"
                )
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


_registry: Registry[Criterion] = Registry("criterion", CRITERIA, lambda criterion: criterion.measure.__qualname__)
"""The criteria that each plugin registered when it was loaded."""


def client_criterion(
    name: str,
    *,
    about: About = "data",
    description: str = "",
    maximum: float | None = None,
    needs_labels: bool = False,
    needs_classes: int | None = None,
    needs_marks: Sequence[str] = (),
    needs_task: NeededTask | None = None,
    needs_expertise: bool = False,
    of_labels: Callable[[Labelled], Floats | None] | None = None,
    at_most_classes: bool = False,
) -> Callable[[Callable[[LocalData], float | bool]], Callable[[LocalData], float | bool]]:
    """Register a function of LocalData as a criterion that each client measures on itself.

    What it needs, such as `needs_marks=("sharp",)`, is compared with what the data can give before a run starts.
    `of_labels` may give the same for many clients at once; a simulation of thousands then measures faster.
    The function gets one client's `LocalData` and returns a number from 0 on, or true or false.

        >>> @steelyard.client_criterion("ROWS", maximum=1000, description="rows, up to 1000")
        ... def rows(local: steelyard.LocalData) -> float: return min(len(local.labels), 1000)

    Raises:
        UserError: the name is taken or no word, or what is decorated is no function.
    """
    check_decorator("client_criterion", name, description, maximum, **_choices(about, needs_task))
    marks = texts_of(needs_marks, "@client_criterion: needs_marks", 'a list of names, such as ["sharp"]')
    check_flags(
        "client_criterion", needs_labels=needs_labels, needs_expertise=needs_expertise, at_most_classes=at_most_classes
    )
    expect("@client_criterion: needs_classes", needs_classes, (int, type(None)), "a whole number, or None")
    if of_labels is not None and not callable(of_labels):
        raise UserError(f"@client_criterion: of_labels: got {brief(of_labels)}; allowed: a function, or None")
    needs = Needs(needs_labels, needs_classes, marks, needs_task, expertise=needs_expertise)

    def register(measure: Callable[[LocalData], float | bool]) -> Callable[[LocalData], float | bool]:
        check_measure("client_criterion", name, measure)
        text = description or (measure.__doc__ or name).strip().splitlines()[0]
        add(Criterion(name, "client", about, text, measure, maximum, needs, of_labels, at_most_classes))
        return measure

    return register


def server_criterion(
    name: str,
    *,
    about: About = "model",
    description: str = "",
    needs_models: bool = True,
    needs_test_set: bool = False,
    needs_task: NeededTask | None = None,
    needs_label_counts: bool = False,
    needs_first_losses: bool = False,
    needs_training: bool = False,
    needs_layers: bool = False,
    uses_claims: bool = False,
    of_one: bool = False,
    maximum: float | None = None,
) -> Callable[[Callable[[CohortView], Floats]], Callable[[CohortView], Floats]]:
    """Register a function of CohortView as a criterion that the server measures, so that no client can lie about it.

    What costs clients something is asked of them only where a criterion needs it: `needs_label_counts` makes
    `view.label_counts` not None, `needs_first_losses` makes `view.first_losses` not None; `needs_training` is for
    `view.root`, what the server learns from rows of its own, `needs_layers` for `view.kernel_norms`. Say `uses_claims`
    where the measure looks at what clients say of themselves (samples, label counts, losses): it is no truer than they
    are. Say `of_one` where a client's value follows from that client alone, and `maximum` where none can be larger:
    noise for privacy can cover no other measures. The function gets the cohort's `CohortView` and returns an array
    [clients] of numbers from 0 on.

        >>> @steelyard.server_criterion("NEAR", description="how near the model stays")
        ... def near(view: steelyard.CohortView): return 1 / (1 + view.divergence)

    Raises:
        UserError: the name is taken or no word, or what is decorated is no function.
    """
    check_decorator("server_criterion", name, description, maximum, **_choices(about, needs_task))
    check_flags(
        "server_criterion",
        needs_models=needs_models,
        needs_test_set=needs_test_set,
        needs_label_counts=needs_label_counts,
        needs_first_losses=needs_first_losses,
        needs_training=needs_training,
        needs_layers=needs_layers,
        uses_claims=uses_claims,
        of_one=of_one,
    )
    needs = Needs(
        models=needs_models,
        test_set=needs_test_set or needs_training,
        slopes=needs_training,
        layers=needs_layers,
        task=needs_task,
        label_counts=needs_label_counts,
        first_losses=needs_first_losses,
    )

    def register(measure: Callable[[CohortView], Floats]) -> Callable[[CohortView], Floats]:
        check_measure("server_criterion", name, measure)
        text = description or (measure.__doc__ or name).strip().splitlines()[0]
        claims = uses_claims or needs_label_counts or needs_first_losses
        add(Criterion(name, "server", about, text, measure, maximum, needs, uses_claims=claims, of_one=of_one))
        return measure

    return register


def _choices(about: object, task: object) -> dict[str, tuple[object, tuple[str, ...]]]:
    found: dict[str, tuple[object, tuple[str, ...]]] = {"about": (about, get_args(About))}
    return found if task is None else {**found, "needs_task": (task, get_args(NeededTask))}


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


def get(name: str) -> Criterion:
    """Return the criterion of that name, or say which names there are."""
    return _registry.get(name)


def check(criterion: Criterion, available: Capabilities) -> None:
    """Refuse a criterion whose needs the run does not meet; call it before any data is read."""
    fault = unmet(criterion.needs, available, {name: other.needs for name, other in known().items()})
    if fault is not None:
        raise UserError(f"weighing.criteria: {criterion.name} {fault}")


def check_decorator(
    decorator: str, name: object, description: object, maximum: Any, **choices: tuple[object, tuple[str, ...]]
) -> None:
    """Refuse what a decorator was given by mistake, before anything is registered; `choices` are words to choose from.

    A decorator without parentheses gets the function as its name.
    """
    expect(f"@{decorator}", name, str, f'@{decorator}("NAME"), with the name of the criterion in parentheses')
    for field, (value, allowed) in choices.items():
        if not isinstance(value, str) or value not in allowed:
            raise UserError(f"@{decorator}: {field}: got {brief(value)}; allowed: {listed(allowed)}")
    expect(f"@{decorator}: description", description, str, "text")
    if maximum is not None:
        expect(f"@{decorator}: maximum", maximum, (int, float), "a number above 0, or None")
        if not 0 < maximum <= LARGEST_REAL:
            raise UserError(f"@{decorator}: maximum: got {brief(maximum)}; allowed: a number above 0, or None")


def check_flags(decorator: str, **flags: object) -> None:
    """Refuse anything but true and false."""
    for field, flag in flags.items():
        expect(f"@{decorator}: {field}", flag, bool, "True or False")


def check_measure(decorator: str, name: str, measure: object) -> None:
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
        raise UserError(f'@{decorator}("{name}"): got {wrong}; allowed: a function of one argument')
