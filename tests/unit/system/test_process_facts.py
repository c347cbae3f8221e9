"""What a process says of itself: packages, driver, CUDA, container, variables; without secrets, and without torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slurmtrain.system.process_facts import gather_facts


def install(folder: Path, name: str, version: str, direct_url: dict[str, object] | None = None) -> None:
    """A distribution, as pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: 9 of the text\n"
    (info / "METADATA").write_text(text)
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))


def test_packages_are_told_with_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    install(first, "Some_Thing", "1.2")
    install(second, "some-thing", "1.1")  # hidden by the one before
    revision = {"vcs": "git", "commit_id": "abc123"}
    install(first, "forked", "2.0", {"url": "https://me:pass@host/forked.git", "vcs_info": revision})
    install(first, "wheel-of-ours", "3", {"url": "https://host/w.whl", "archive_info": {"hashes": {"sha256": "f00"}}})
    (first / "broken-1.dist-info").mkdir()  # without metadata
    (first / "torch").mkdir()
    (first / "torch" / "version.py").write_text("cuda: Optional[str] = '12.8'\ngit_version = 'cafe'\nhip = None\n")
    install(first, "nvidia-nccl-cu12", "2.27.3")
    monkeypatch.setattr(sys, "path", [str(first), str(second)])
    facts = gather_facts({}, tmp_path)
    assert facts.packages == {"forked": "2.0", "nvidia-nccl-cu12": "2.27.3", "some-thing": "1.2", "wheel-of-ours": "3"}
    assert facts.gpu == {"cuda": "12.8", "torch_revision": "cafe", "nccl": "2.27.3"}
