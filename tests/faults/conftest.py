"""What all fault tests need first."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pytest makes its own temporary folder before a test looks at what lies in the system's."""
    tmp_path_factory.getbasetemp()
