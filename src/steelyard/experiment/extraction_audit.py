"""Model extraction on digits: how well is a model copied by whoever may only ask it?

A linear model is solved for from its probabilities: ln p_c − ln p_0 = (w_c − w_0)·x + b_c − b_0 is linear in what is
sought, so as many questions as inputs, and one more, give it exactly (F. Tramèr, F. Zhang, A. Juels, M. K. Reiter, T.
Ristenpart: "Stealing Machine Learning Models via Prediction APIs", USENIX Security 2016). All else is copied by
training a model of the same form on the answers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import nn

from steelyard.experiment.privacy_audit import Victims, picked, victims

ANSWERS: Mapping[str, int | None] = {"probabilities": None, "two digits": 2, "class alone": 0}
"""What is answered to a question: all digits of each probability, some of them, or which class is the likeliest."""
_ROWS = 600
"""Rows that the model is trained on, and as many that the attacker has of the same kind, without labels."""
_STEPS = 200


class ExtractionRow(TypedDict):
    """One copy of one model; `agrees` is the share of fresh rows to which both say the same class."""

    model: str
    questions: str
    count: int
    answer: str
    agrees: float
    apart: float


def audit_extraction(count: int) -> list[ExtractionRow]:
    """Copy a linear model and an MLP by `count` questions; one entry per model, kind of question and answer.

    `apart` is how far the probabilities of model and copy are apart on fresh rows: half the sum of the differences.
    """
    held = victims()
    rows = picked(held, len(held.rows), 0)
    mine, theirs, fresh = rows[:_ROWS], rows[_ROWS : 2 * _ROWS], rows[2 * _ROWS :]
    noise = torch.rand((count, held.rows.shape[1]), generator=torch.Generator().manual_seed(0))
    asked = {"digits of others": held.rows[theirs[:count]], "random pixels": noise}
    found: list[ExtractionRow] = []
    for name, start in held.models.items():
        model = _trained(start, held.rows[mine], nn.functional.one_hot(held.labels[mine]).float())
        for kind, questions in asked.items():
            for answer, digits in ANSWERS.items():
                answered = _answered(model, questions, digits)
                solved = name == "linear" and digits is None
                copied = _solved(start, questions, answered) if solved else _trained(start, questions, answered)
                agrees, apart = _compared(model, copied, held, fresh)
                found.append(
                    {
                        "model": name,
                        "questions": kind,
                        "count": len(questions),
                        "answer": answer,
                        "agrees": agrees,
                        "apart": apart,
                    }
                )
    return found


@torch.no_grad()
def _answered(model: nn.Module, rows: torch.Tensor, digits: int | None) -> torch.Tensor:
    """Return the probabilities of each class as the model's owner gives them out."""
    shares = model(rows).double().softmax(dim=1)
    if digits == 0:
        return nn.functional.one_hot(shares.argmax(dim=1), shares.shape[1]).double()
    return shares if digits is None else shares.round(decimals=digits)


def _solved(start: nn.Module, rows: torch.Tensor, answers: torch.Tensor) -> nn.Module:
    """Return the linear model whose probabilities these are, by least squares over all questions."""
    logs = answers.clamp(min=1e-300).log()
    inputs = torch.cat([rows.double(), torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
    found = torch.linalg.lstsq(inputs, logs - logs[:, :1], driver="gelsd").solution
    solved = copy.deepcopy(start).double()
    weights, biases = solved.parameters()
    with torch.no_grad():
        weights.copy_(found[:-1].T)
        biases.copy_(found[-1])
    return solved.float()


def _trained(start: nn.Module, rows: torch.Tensor, shares: torch.Tensor) -> nn.Module:
    """Return a model of this form, trained to give these shares of each class."""
    model = copy.deepcopy(start)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(rows), shares.float()).backward()
        optimiser.step()
    return model


@torch.no_grad()
def _compared(model: nn.Module, copied: nn.Module, held: Victims, fresh: torch.Tensor) -> tuple[float, float]:
    one, other = (each(held.rows[fresh]).softmax(dim=1) for each in (model, copied))
    same = (one.argmax(dim=1) == other.argmax(dim=1)).double().mean()
    return float(same), float((one - other).abs().sum(dim=1).mean() / 2)
