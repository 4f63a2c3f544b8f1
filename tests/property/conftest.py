"""The pools of workers end with the tests that use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.property.machine import Training


@pytest.fixture(scope="package", autouse=True)
def _pools() -> Iterator[None]:
    yield
    for pool in Training.pools.values():
        pool.close()
