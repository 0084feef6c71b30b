"""The scripts that show a Vega-Lite figure without a network: Vega, Vega-Lite and Vega-Embed, from vl-convert."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

from steelyard.base.files import cache_folder


def bundle() -> str:
    """Return one script that defines `vegaEmbed`, `vega` and `vegaLite`; safe inside a script element.

    Putting it together takes some seconds, so it is kept in the user's cache folder, under vl-convert's version.
    """
    path = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    # For speed of start: only a report or a page needs it.
    import vl_convert

    made = str(vl_convert.javascript_bundle())  # pyright: ignore[reportCallIssue]
    made = made.replace("</script", r"<\/script").replace("<!--", r"<\!--")
    _keep(path, made)
    return made


def _keep(path: Path, text: str) -> None:
    """Write whole or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        return
