"""Which tests on real ranks `make test` runs; the others are marked slow, and run by `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

QUICK = ("test_accumulate_bytes.py", "test_execution.py", "test_grad_lifetimes.py", "test_wgrad.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
