"""These tests need one NVIDIA GPU and are skipped without it: `python -m pytest tests/gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.gloo import GlooRanks
from tests.support.local_runs import Project


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="it needs an NVIDIA GPU"))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    try:
        yield made
    finally:
        made.reap()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[GlooRanks]:
    with GlooRanks(tmp_path) as started:
        yield started
