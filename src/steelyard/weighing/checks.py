"""What is handed to a rule or to a criterion's decorator in Python, checked before anything is done with it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, get_args

import numpy as np

from steelyard.base.errors import UserError, brief, expect, listed
from steelyard.base.settings import LARGEST_REAL
from steelyard.messages.updates import Floats
from steelyard.weighing.weights import Normalising


def values_of(values: object, names: Sequence[str], where: str = "values") -> Floats:
    """Return an array whose last axis has a number for each of the criteria."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is None or not found.ndim or found.shape[-1] != len(names):
        raise UserError(
            f"{where}: got {brief(values)}; allowed: an array [clients, {len(names)}], a number for each of "
            f"{listed(names)}"
        )
    return found


def measures_of(raw: object, names: Sequence[str]) -> Floats:
    """Return raw measures [clients, criteria], each a finite number from 0 on."""
    found = values_of(raw, names, "raw")
    if found.ndim != 2 or not len(found) or not bool((np.isfinite(found) & (found >= 0)).all()):
        raise UserError(
            f"raw: got {brief(found.tolist())}; allowed: an array [clients, criteria] of finite numbers from 0 on"
        )
    return found


def order_of(order: object, names: Sequence[str]) -> list[int]:
    """Return an order of the criteria, as their positions."""
    places = list(range(len(names)))
    found = list[Any](order) if isinstance(order, list | tuple) else []
    if not all(isinstance(place, Integral) for place in found) or sorted(found) != places:
        raise UserError(f"order: got {brief(order)}; allowed: the positions 0 to {len(names) - 1}, each once")
    return found


def check_how(how: object) -> None:
    """Refuse a way of normalising that there is not."""
    if not isinstance(how, str | None) or how not in (None, "rule", *get_args(Normalising)):
        raise UserError(f"how: got {brief(how)}; allowed: rule, {listed(get_args(Normalising))}, None")


def items_of(values: object, kind: type, where: str, allowed: str) -> list[Any]:
    """Return things of one kind that a user gave in some order."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise UserError(f"{where}: got {brief(values)}; allowed: {allowed}")
    try:
        found = list[Any](values)
    except (RuntimeError, TypeError):
        found = [None]
    for value in found:
        expect(where, value, kind, allowed)
    return found


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
