"""The recorded answers of vLLM, read once."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parent / "cases" / "transfer_topology.jsonl.xz"


@pytest.fixture(scope="session")
def vllm_cases() -> dict[str, list[dict[str, Any]]]:
    """All cases by kind: "tp" and "pp"."""
    cases: dict[str, list[dict[str, Any]]] = {}
    with lzma.open(CASES, "rt", encoding="utf-8") as lines:
        for line in lines:
            case = json.loads(line)
            cases.setdefault(case["kind"], []).append(case)
    return cases
