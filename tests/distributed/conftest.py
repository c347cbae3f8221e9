"""Ranks as processes of this machine: bare ones that meet through gloo, and whole local runs started by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gloo import GlooRanks
from tests.support.local_runs import Project


@pytest.fixture
def gloo_ranks(tmp_path: Path) -> Iterator[GlooRanks]:
    with GlooRanks(tmp_path) as ranks:
        yield ranks


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path / "project")
    try:
        yield project
    finally:
        project.reap()
