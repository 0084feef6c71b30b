"""What tests of several parts of a report look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.made_run import shared_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_run(tmp_path_factory)
