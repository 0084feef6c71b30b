"""`steelyard docs`: the documentation that comes with the package, in the browser and without a network.

What makes the pages is imported inside the command, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.errors import UserError


def docs(
    words: Annotated[
        list[str] | None, typer.Argument(help="Look for these words, and open the page that fits best.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the pages into this folder; default: the cache.")
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Open the guide and the reference in the browser, from the installed package: no network is needed."""
    import webbrowser

    from steelyard import manual

    page = "index"
    if words:
        found = manual.search(" ".join(words))
        if not found:
            raise UserError(f"docs: no page holds '{' '.join(words)}'; allowed: other words, or none to see all pages")
        for _, path, title in found[:10]:
            print(f"{path}: {title}")
        page = found[0][1]
    address = (manual.write_pages(out) / f"{page}.html").resolve().as_uri()
    print(address)
    if show:
        webbrowser.open(address)
