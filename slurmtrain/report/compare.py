"""Differences between two runs: config, code, data, and the first step at which their logs differ.

Everything is a pure function of the runs' files.
"""

from __future__ import annotations

import filecmp
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import ConfigError, UnavailableRecordError, UnreadableRecordError
from slurmtrain.observe.metrics import is_measured
from slurmtrain.report.collect import metrics_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import read_environment
from slurmtrain.system.records import is_scalar

MISSING = object()  # a key that one of the two does not have, which is not null


@dataclass(frozen=True)
class Divergence:
    """The first step that both have logged with different values of a metric."""

    step: int
    a: float
    b: float


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs, a and b.

    Attributes:
        config: (dotted key, value in a, value in b) of each difference; MISSING if there is no such key.
        files: paths of files that differ between the snapshots of the code; None when one ran in place.
        environment: (group.name, value in a, value in b) of what the newest attempt of each ran with, as far as it differs:
            packages, driver, CUDA and NCCL, image.
        unrecorded: the runs, "a" or "b", of which no attempt has recorded it; nothing but the image is compared then.
        steps: steps that both have logged.
        data: comparison of the samples that they have seen.
        divergences: by metric, the first difference; a metric that never differs is not in it.
        final: by metric, the last value of each; None if it was never logged.
    """

    config: list[tuple[str, Any, Any]]
    files: list[str] | None
    environment: list[tuple[str, Any, Any]]
    unrecorded: list[str]
    steps: list[int]
    data: Data
    divergences: dict[str, Divergence]
    final: dict[str, tuple[float | None, float | None]]

    @property
    def first_divergence(self) -> Divergence | None:
        """The earliest difference in a metric that does not measure speed."""
        found = [divergence for name, divergence in self.divergences.items() if not is_measured(name)]
        return min(found, key=lambda divergence: divergence.step, default=None)


@dataclass(frozen=True)
class Data:
    """The comparison of the samples that two runs have seen.

    Attributes:
        steps: steps at which both have logged the hash of the samples so far.
        parts_at: the first of them at which it differs; None when it never does.
    """

    steps: list[int]
    parts_at: int | None


def compare(a: RunDir, b: RunDir, *, tolerance: float = 0.0) -> Comparison:
    """Compare two runs.

    Args:
        tolerance: relative difference up to which values are equal; 0: every bit counts.

    Raises:
        ConfigError: one of the configs cannot be read.
        UnreadableRecordError: one of the logs or snapshots cannot be read.
    """
    logs = by_step(metrics_of(a)), by_step(metrics_of(b))
    environments = {"a": _environment(a), "b": _environment(b)}
    unrecorded = [side for side, found in environments.items() if found is None]
    known: tuple[Any, Any] = ({}, {}) if unrecorded else (environments["a"], environments["b"])
    return Comparison(
        config_differences(_config(a), _config(b)),
        None if _in_place(a) or _in_place(b) else code_differences(snapshot_of(a), snapshot_of(b)),
        [*config_differences(_image(a), _image(b), "image"), *config_differences(*known)],
        unrecorded,
        sorted(logs[0].keys() & logs[1].keys()),
        compare_data(a, b),
        divergences(*logs, tolerance=tolerance),
        _final(*logs),
    )


def _environment(run_dir: RunDir) -> dict[str, dict[str, str]] | None:
    """Return what the newest attempt that has recorded it ran with, without the name of its host; None: none has."""
    found = (read_environment(run_dir.attempt(number)) for number in reversed(run_dir.attempt_numbers()))
    newest = next((facts for facts in found if facts is not None), None)
    if newest is None:
        return None
    newest.get("system", {}).pop("host", None)
    return {group: facts for group, facts in newest.items() if facts}


def _image(run_dir: RunDir) -> dict[str, str]:
    """Return the image of a run's container, and its digest, as submit has recorded them."""
    image = run_dir.info().get("image") or {}
    return {name: str(image[key])[:400] for name, key in (("image", "image"), ("digest", "digest")) if image.get(key)}


def compare_data(a: RunDir, b: RunDir) -> Data:
    """Compare the samples that two runs have seen, by the hashes that both have logged."""
    hashes = [
        {record["step"]: record["data_hash"] for record in metrics_of(run) if record.get("data_hash")} for run in (a, b)
    ]
    steps = sorted(hashes[0].keys() & hashes[1].keys())
    return Data(steps, next((step for step in steps if hashes[0][step] != hashes[1][step]), None))


def config_differences(a: Any, b: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, a's value, b's value) of each difference, in a's order. Lists are compared as a whole."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [
            difference
            for key in dict.fromkeys([*a, *b])
            for difference in config_differences(a.get(key, MISSING), b.get(key, MISSING), f"{where}.{key}".lstrip("."))
        ]
    if isinstance(a, Mapping) and a and b is MISSING:
        return [difference for key in a for difference in config_differences(a[key], MISSING, f"{where}.{key}")]
    if isinstance(b, Mapping) and b and a is MISSING:
        return [difference for key in b for difference in config_differences(MISSING, b[key], f"{where}.{key}")]
    same = type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))
    return [] if same else [(where, a, b)]


def snapshot_of(run_dir: RunDir) -> Path:
    """Return the folder of a run's snapshot; that of the runs of a sweep, which share one, is the sweep's."""
    return run_dir.path.parent / "code" if run_dir.code.is_symlink() else run_dir.code


def code_differences(a: Path, b: Path) -> list[str]:
    """Return the paths of files that differ between two snapshots, or are in one of them only."""
    left, right = _files(a), _files(b)
    both = left.keys() & right.keys()
    try:
        differ = {name for name in both if not filecmp.cmp(left[name], right[name], shallow=False)}
    except OSError as error:
        raise UnavailableRecordError(f"{error.filename} cannot be read: {error.strerror}", error) from None
    return sorted(differ | (left.keys() ^ right.keys()))


def divergences(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]], *, tolerance: float = 0.0
) -> dict[str, Divergence]:
    """Return, by metric, the first step that both have with values that differ. Logs are values by step and name."""
    found: dict[str, Divergence] = {}
    for step in sorted(a.keys() & b.keys()):
        for name in a[step].keys() & b[step].keys() - found.keys():
            if not _equal(a[step][name], b[step][name], tolerance):
                found[name] = Divergence(step, a[step][name], b[step][name])
    return found


def _equal(a: float, b: float, tolerance: float) -> bool:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(abs(a), abs(b))


def by_step(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return scalars by step and name; if a step was logged again, the latest."""
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        values = {name: value for name, value in record.items() if name != "step" and is_scalar(value)}
        steps.setdefault(record["step"], {}).update(values)
    return steps


def _final(*logs: Mapping[int, Mapping[str, float]]) -> dict[str, tuple[float | None, float | None]]:
    last = [{name: value for step in sorted(log) for name, value in log[step].items()} for log in logs]
    return {name: (last[0].get(name), last[1].get(name)) for name in dict.fromkeys([*last[0], *last[1]])}


def _in_place(run_dir: RunDir) -> bool:
    """Return whether the run ran where it was submitted; then the folder `code` has at most this package."""
    return str(run_dir.info().get("workdir", "/")).startswith("/")


def _files(tree: Path) -> dict[str, Path]:
    """Return the files of a snapshot by their path within it, ignoring links and what Python has compiled."""
    if tree.is_symlink():
        return {}
    found = (Path(folder) / name for folder, _, names in os.walk(tree) for name in names)
    return {
        str(path.relative_to(tree)): path
        for path in found
        if path.parent.name != "__pycache__" and path.is_file() and not path.is_symlink()
    }


def _config(run_dir: RunDir) -> Any:
    """Return the frozen config as plain values, so that runs of another version can be compared, too."""
    try:
        return run_dir.config_values()
    except UnreadableRecordError as error:
        raise ConfigError(error.message, hint=error.hint) from None
