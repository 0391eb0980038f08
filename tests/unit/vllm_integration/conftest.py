"""A book and a clock that are the test's own."""

import pytest
from tests.unit.vllm_integration.books import Clock, HandBook


@pytest.fixture
def book():
    return HandBook()


@pytest.fixture
def clock():
    return Clock()
