"""Frozen configs of other versions of this package: what has become of their fields since.

A run waits, or is requeued, for weeks, and the package may be updated meanwhile. A field that is new has its default;
one that was renamed or removed since is migrated here; one that is unknown because the config is newer is named in an
error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurmtrain.config.schema import (
    Config,
    LoraConfig,
    ObserveConfig,
    PreflightConfig,
    SearchConfig,
    StageConfig,
    WatchdogConfig,
)
from slurmtrain.earlier_names import with_earlier_names, with_names_of_today
from slurmtrain.errors import ConfigError

# Counted up whenever a field is renamed or removed, which tests/unit/config/frozen keeps an example of.
SCHEMA_VERSION = 4
# By the version that changed it: the new name of a field, or None for one that was removed, as in "train.seed".
CHANGED: dict[int, dict[str, str | None]] = {
    2: {"parallel.ep": None},
    4: {"train.max_nonfinite": "train.max_skipped"},
}
# Removed fields that could have one value only. The identity of an experiment counts them still: a config of before and
# the same one of today are one experiment.
CONSTANT: dict[str, Any] = {"parallel.ep": 1}
# Fields that were added later. A config in which one has this value is frozen and identified as before it was there.
ADDED: dict[str, Any] = {
    "train.hooks": [],
    "train.deterministic": False,
    "requeue.in_place": None,
    "requeue.standby_ranks": False,
    "requeue.blame_threshold": 2,
    "requeue.blame_expiry_h": 24.0,
    "watchdog": dataclasses.asdict(WatchdogConfig()),
    "train.on_nonfinite": "skip",
    "train.max_rollbacks": 2,
    "train.on_spike": "tell",
    "train.spike_window": 100,
    "train.spike_threshold": 10.0,
    "lora": dataclasses.asdict(LoraConfig()),
    "prepare.records": "text",
    "prepare.chat_template": None,
    "prepare.loss_on": "answers",
    "checkpoint.local": None,
    "checkpoint.local_every_steps": 0,
    "checkpoint.export_every_steps": 0,
    "checkpoint.export_dtype": "bfloat16",
    "job.launcher": "none",
    "job.stop_signal": "SIGTERM",
    "job.stop_grace_s": None,
    "job.checkpoints": None,
    "job.checkpoint_complete": None,
    "cluster.peak_tflops": None,
    "cluster.node_paths": [],
    "cluster.gpu_link_gb_per_s": None,
    "cluster.network_gb_per_s": None,
    "cluster.storage_gb_per_s": None,
    "cluster.failures_per_1000_node_days": 6.5,
    "observe": dataclasses.asdict(ObserveConfig()),
    "search": dataclasses.asdict(SearchConfig()),
    "preflight": dataclasses.asdict(PreflightConfig()),
    "cluster.port_range": None,
    "cluster.compile_cache": None,
    "cluster.switches": None,
    "cluster.switches_wait_min": None,
    "cluster.segment": None,
    "cluster.stage": dataclasses.asdict(StageConfig()),
}
HEADER = "# Frozen by slurmtrain, schema version {}.\n"
HEADER_LINE = re.compile(r"^# Frozen by slurmtrain, schema version (\d+)\.")


def header() -> str:
    """Return the first line of a frozen config: a comment, so that any program can read the rest."""
    return HEADER.format(SCHEMA_VERSION)


def version_of(text: str) -> int:
    """Return the schema version of a frozen config; 0: it was frozen before versions were counted."""
    found = HEADER_LINE.match(text)
    return int(found.group(1)) if found else 0


def migrate(values: dict[str, Any], version: int, *, now: int = SCHEMA_VERSION) -> list[str]:
    """Bring the values of a frozen config to this version, in place.

    Returns:
        Dotted names of fields that were dropped, since they no longer exist; without those that could have one value
        only, and had it.

    Raises:
        ConfigError: the config is of a newer version, and has fields that are unknown here.
    """
    if version < 3 <= now:  # only our decoder's fields were renamed, not those of any model
        values.update(with_names_of_today(values))
    left_out = []
    for changed in range(version + 1, now + 1):
        for field, target in CHANGED.get(changed, {}).items():
            found, value = _take(values, field)
            if found and target is not None:
                _put(values, target, value)
            elif found and (field not in CONSTANT or value != CONSTANT[field]):
                left_out.append(field)
    unknown = [field for field in _unknown(values, Config) if field not in left_out]
    if unknown and version > now:
        raise ConfigError(
            f"config.yaml was frozen by a newer slurmtrain (schema version {version}; here it is {now}), and has fields that "
            f"are not known here: {', '.join(unknown)}",
            hint="install the slurmtrain that submitted it, where the job runs",
        )
    if version < now:
        for field in unknown:
            _take(values, field)
            left_out.append(field)
    return left_out


def as_first_digested(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config with the names and fields of version 1, by which an experiment is identified ever since."""
    values = without_unused(with_earlier_names(values))
    for field, value in CONSTANT.items():
        _put(values, field, value)
    found, most = _take(values, "train.max_skipped")
    if found:
        _put(values, "train.max_nonfinite", most)
    return values


def without_unused(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that were added later and are not used, in place, and return the values."""
    for field, unused in ADDED.items():
        *path, last = field.split(".")
        node: Any = values
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node and node[last] == unused:
            del node[last]
    return values


def with_unused(values: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that were added later and are missing, with the value that means that they are not used.

    The inverse of `without_unused`, in place, for those who compare configs field by field. Returns the values.
    """
    for field, unused in ADDED.items():
        *path, last = field.split(".")
        node: Any = values
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = _filled(node[last], unused) if last in node else _plain(unused)
    return values


def _filled(value: Any, unused: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(unused, dict):
        return value
    return {**_plain(unused), **{name: _filled(each, unused.get(name)) for name, each in value.items()}}


def _plain(value: Any) -> Any:
    """Return a copy as YAML has it, without enumerations."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, str) else list(value) if isinstance(value, list) else value


def _unknown(values: Mapping[str, Any], schema: Any, where: str = "") -> Iterator[str]:
    """Yield the fields that the schema does not have. Keys of open dicts are not checked."""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for name, value in values.items():
        if name not in fields:
            yield f"{where}{name}"
            continue
        inner = fields[name].default_factory
        if dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
            yield from _unknown(value, inner, f"{where}{name}.")


def _take(values: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Remove a field, and return whether it was there, and its value."""
    *path, last = field.split(".")
    node: Any = values
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return (True, node.pop(last)) if isinstance(node, dict) and last in node else (False, None)


def _put(values: dict[str, Any], field: str, value: Any) -> None:
    *path, last = field.split(".")
    node = values
    for name in path:
        node = node.setdefault(name, {})
    node.setdefault(last, value)
