"""What is handed to rules and decorators in Python is refused with one whole line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.weighing import checks
from steelyard.weighing.criteria import client_criterion, get, known, server_criterion
from steelyard.weighing.rule import Rule, WeighingSettings

RULE = Rule(WeighingSettings(criteria=("DS", "LD")))
CRITERIA = "WeighingSettings(criteria=['DS'])"


def broken() -> Iterator[Any]:
    yield get("DS")
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: RULE.score([[1.0], ["x"]]),  # type: ignore[arg-type]
            "values: got [[1.0], ['x']]; allowed: an array [clients, 2], a number for each of DS, LD",
        ),
        (
            lambda: RULE.score(np.array(1.0)),
            "values: got array(1.); allowed: an array [clients, 2], a number for each of DS, LD",
        ),
        (
            lambda: RULE.weigh(np.array([1.0, 2.0])),
            "raw: got [1.0, 2.0]; allowed: an array [clients, criteria] of finite numbers from 0 on",
        ),
        (
            lambda: RULE.weigh(np.zeros((0, 2))),
            "raw: got []; allowed: an array [clients, criteria] of finite numbers from 0 on",
        ),
        (
            lambda: RULE.weigh(np.array([[1.0, -1.0]])),
            "raw: got [[1.0, -1.0]]; allowed: an array [clients, criteria] of finite numbers from 0 on",
        ),
        (
            lambda: RULE.weigh(np.array([[1.0, np.inf]])),
            "raw: got [[1.0, inf]]; allowed: an array [clients, criteria] of finite numbers from 0 on",
        ),
        (lambda: RULE.weigh(np.ones((1, 2)), [0, 0]), "order: got [0, 0]; allowed: the positions 0 to 1, each once"),
        (lambda: RULE.weigh(np.ones((1, 2)), "01"), "order: got '01'; allowed: the positions 0 to 1, each once"),
        (
            lambda: RULE.weigh(np.ones((1, 2)), [0.0, 1.0]),
            "order: got [0.0, 1.0]; allowed: the positions 0 to 1, each once",
        ),  # type: ignore[list-item]
        (
            lambda: RULE.weigh(np.ones((1, 2)), how="best"),  # type: ignore[arg-type]
            "how: got 'best'; allowed: rule, share, max, rank, None",
        ),
        (lambda: RULE.weigh(np.ones((1, 2)), how=1), "how: got 1; allowed: rule, share, max, rank, None"),  # type: ignore[arg-type]
        (lambda: Rule("DS"), f"Rule: got 'DS'; allowed: WeighingSettings, such as {CRITERIA}"),  # type: ignore[arg-type]
        (
            lambda: Rule(WeighingSettings(), "DS"),  # type: ignore[arg-type]
            "Rule: known: got 'DS'; allowed: criteria, or None to look them up",
        ),
        (
            lambda: Rule(WeighingSettings(), 3),  # type: ignore[arg-type]
            "Rule: known: got 3; allowed: criteria, or None to look them up",
        ),
        (
            lambda: Rule(WeighingSettings(), [get("DS"), "LD"]),  # type: ignore[list-item]
            "Rule: known: got 'LD'; allowed: criteria, or None to look them up",
        ),
        (
            lambda: Rule(WeighingSettings(), broken()),
            "Rule: known: got None; allowed: criteria, or None to look them up",
        ),
        (
            lambda: Rule(WeighingSettings(criteria=("DS", "MD", "LD")), [get("LE"), get("LD")]),
            "Rule: known: lacks DS, MD; allowed: at least the rule's own",
        ),
        *(
            (call, line.replace("DECORATOR", decorator.__name__))
            for decorator in (client_criterion, server_criterion)
            for call, line in (
                (
                    lambda made=decorator: made(7),  # type: ignore[arg-type]
                    '@DECORATOR: got 7; allowed: @DECORATOR("NAME"), with the name of the criterion in parentheses',
                ),
                (
                    lambda made=decorator: made("X", about="weather"),  # type: ignore[arg-type]
                    "@DECORATOR: about: got 'weather'; allowed: data, model, device, user",
                ),
                (
                    lambda made=decorator: made("X", needs_task="luck"),  # type: ignore[arg-type]
                    "@DECORATOR: needs_task: got 'luck'; allowed: classes, regression, survival, segmentation, "
                    "multi-label",
                ),
                (
                    lambda made=decorator: made("X", about=3),  # type: ignore[arg-type]
                    "@DECORATOR: about: got 3; allowed: data, model, device, user",
                ),
                (
                    lambda made=decorator: made("X", description=3),  # type: ignore[arg-type]
                    "@DECORATOR: description: got 3; allowed: text",
                ),
                (
                    lambda made=decorator: made("X", maximum="3"),  # type: ignore[arg-type]
                    "@DECORATOR: maximum: got '3'; allowed: a number above 0, or None",
                ),
                (
                    lambda made=decorator: made("X", maximum=0),
                    "@DECORATOR: maximum: got 0; allowed: a number above 0, or None",
                ),
                (
                    lambda made=decorator: made("X", maximum=2e30),
                    "@DECORATOR: maximum: got 2e+30; allowed: a number above 0, or None",
                ),
                (
                    lambda made=decorator: made("X")(3),  # type: ignore[arg-type]
                    '@DECORATOR("X"): got 3; allowed: a function of one argument',
                ),
                (
                    lambda made=decorator: made("a b")(lambda one: one),  # type: ignore[arg-type]
                    "criterion name 'a b': allowed: letters, digits, '-' and '_'",
                ),
            )
        ),
        *(
            (
                lambda flag=flag: client_criterion("X", **{flag: 1}),
                f"@client_criterion: {flag}: got 1; allowed: True or False",
            )  # type: ignore[arg-type]
            for flag in ("needs_labels", "needs_expertise", "at_most_classes")
        ),
        *(
            (
                lambda flag=flag: server_criterion("X", **{flag: 1}),
                f"@server_criterion: {flag}: got 1; allowed: True or False",
            )  # type: ignore[arg-type]
            for flag in (
                *(
                    "needs_models",
                    "needs_test_set",
                    "needs_label_counts",
                    "needs_first_losses",
                    "uses_claims",
                    "of_one",
                ),
            )
        ),
        (
            lambda: client_criterion("X", needs_classes=2.5),  # type: ignore[arg-type]
            "@client_criterion: needs_classes: got 2.5; allowed: a whole number, or None",
        ),
        (
            lambda: client_criterion("X", needs_marks="sharp"),
            "@client_criterion: needs_marks: got 'sharp'; allowed: a list of names, such as [\"sharp\"]",
        ),
        (
            lambda: client_criterion("X", of_labels=3),  # type: ignore[arg-type]
            "@client_criterion: of_labels: got 3; allowed: a function, or None",
        ),
    ],
)
def test_one_line_says_what_was_wrong(call: Callable[[], object], line: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value) == line
    assert "X" not in known()


def test_what_is_taken() -> None:
    assert checks.order_of((1, 0), "ab") == [1, 0]
    assert checks.items_of((get("DS"),), type(get("DS")), "here", "criteria") == [get("DS")]
    checks.check_decorator("d", "X", "", checks.LARGEST_REAL)
    checks.check_measure("d", "X", max)  # a function in C, whose arguments nobody can look up
    with pytest.raises(
        UserError, match=r'^@d\("X"\): got <.*> \(too many positional arguments\); allowed: a function of'
    ):
        checks.check_measure("d", "X", lambda: 1)
