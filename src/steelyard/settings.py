"""The base of every section of an experiment's description."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of an experiment file: frozen, every field checked, unknown fields refused.

    Derive from it in the room that the section configures; a string under a field is its documentation and
    appears in `steelyard show --schema`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
