"""What privacy needs beyond the core: checked before a run, in one line that says how to get it."""

from __future__ import annotations

from importlib.util import find_spec

from steelyard.base.errors import UserError
from steelyard.privacy.settings import AggregationSettings

INSTALL = "pip install 'steelyard[privacy]'"
_NEEDED = {
    "secure": {"cryptography": "privacy"},
    "paillier": {"cryptography": "privacy", "gmpy2": "encryption"},
    "ckks": {"cryptography": "privacy", "tenseal": "encryption"},
}
"""By kind of aggregation: the modules that it cannot do without, and the extra that brings each."""


def check_accounting() -> None:
    """Refuse a budget where the library that adds it up is missing."""
    if find_spec("dp_accounting") is None:
        raise UserError(f"privacy: a budget needs the package dp-accounting, which is not installed; {INSTALL}")


def check_installed(settings: AggregationSettings) -> None:
    """Refuse a kind of aggregation whose library is missing."""
    for module, extra in _NEEDED[settings.kind].items():
        if find_spec(module) is None:
            raise UserError(
                f"privacy.aggregation.kind: '{settings.kind}' needs {module}, which is not installed; "
                f"pip install 'steelyard[{extra}]'"
            )
