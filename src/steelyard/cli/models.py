"""`steelyard models`: the list of built-in networks."""

from __future__ import annotations

import textwrap
from math import prod
from typing import Annotated, Literal

import typer

from steelyard.cli.printing import print_json, terminal_width


def models(
    format: Annotated[
        Literal["text", "json"], typer.Option("--format", help="text for people, json for programs.")
    ] = "text",
) -> None:
    """List the built-in networks: what each is for, how large it is, and the fields that change it."""
    # For speed of start, as in every command.
    from steelyard.learning.catalogue import BUILT_IN

    if format == "json":
        print_json(
            [
                {
                    "name": model.name,
                    "purpose": model.purpose,
                    "typical_shape": list(model.shape),
                    "typical_outputs": model.outputs,
                    "parameters": model.parameters,
                    "fields": list(model.fields),
                }
                for model in BUILT_IN
            ]
        )
        return
    width = max(len(model.name) for model in BUILT_IN)
    for model in BUILT_IN:
        shape = "×".join(map(str, model.shape)) if len(model.shape) > 1 else f"{prod(model.shape)} columns"
        _print(f"{model.name:<{width}}  {model.purpose}", width + 2)
        _print(
            f"{'':<{width}}  {model.parameters:,} parameters for samples of {shape} and {model.outputs} "
            f"output{'s' if model.outputs > 1 else ''}; fields: {', '.join(model.fields)}",
            width + 2,
        )
    print()
    _print('In an experiment: [model] name = "mlp". Your own torch.nn.Module: name = "file.py:factory".', 0)


def _print(line: str, indent: int) -> None:
    """Print a line; in a terminal it is broken so that it stays beside the model's name."""
    columns = terminal_width()
    print(line if columns is None else textwrap.fill(line, columns, subsequent_indent=" " * indent))
