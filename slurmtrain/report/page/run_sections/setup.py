"""Sections of what a run runs on and with: machines, environment and config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slurmtrain.report.compare import MISSING
from slurmtrain.report.page import units
from slurmtrain.report.page.contents import Section, grid
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.runs.software import words_for_changes

MOST_SETTINGS = 2000
MOST_GPUS = 512  # rows
SHOWN_ELSEWHERE = frozenset(
    """name overrides backend user host created slurm_conf job_ids config_hash steps code workdir submit_dir packed
    own_checkpoints chain chain_after varied id""".split()
)


def system_section(facts: RunFacts) -> Section:
    """Return the section of the machines and the environment of the run."""
    info, last = facts.info, facts.attempts[-1] if facts.attempts else None
    rows: list[tuple[str, str]] = []

    def add(name: str, value: object) -> None:
        if value not in (None, "", [], {}):
            rows.append((name, units.clean(value)))

    if last is not None:
        add("nodes of the newest attempt", units.listed((units.clean(node, 64) for node in last.nodes), 16))
        add("ranks", last.world_size or None)
        add("host of rank 0", last.host)
    if facts.goodput is not None and facts.goodput.gpu_count:
        add("GPUs", f"{facts.goodput.gpu_count:g}")
    kind = facts.setting("cluster.gpu_type")
    add("GPU type", kind)
    for key in (
        "cluster.partition",
        "cluster.account",
        "cluster.qos",
        "cluster.time_limit_min",
        "cluster.container.image",
    ):
        add(key, facts.setting(key))
    parallel = facts.setting("parallel")
    if isinstance(parallel, Mapping):
        sizes = {name: parallel.get(name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
        add("parallel axes", ", ".join(f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)))
    add("jobs", ", ".join(map(str, info.get("job_ids") or ())))
    code = info.get("code")
    if isinstance(code, Mapping) and code.get("revision"):
        add("code", f"revision {units.clean(code['revision'], 80)}{words_for_changes(code.get('dirty'))}")
    add("config hash", info.get("config_hash"))
    add("overrides", " ".join(info.get("overrides") or ()))
    add("run directory", facts.run_dir.path)
    add("submitted from", info.get("submit_dir"))
    grids = [grid("The run and its machines", ("item", "value"), rows)]
    used = _gpu_rows(facts)
    if used:
        header = ("node", "GPU", "busy", "idle", "power", "peak memory", "highest temperature", "errors")
        grids.append(grid("GPUs in the newest attempt", header, used, folded=len(used) > 16))
    rest = environment_rows({**facts.environment, **info})
    if rest:
        grids.append(
            grid("Environment, as recorded when the run started", ("item", "value"), rest, folded=len(rest) > 12)
        )
    return Section("system", "System and environment", grids=tuple(grids))


def _gpu_rows(facts: RunFacts) -> list[tuple[str, ...]]:
    """Return the GPUs of the newest attempt, as NVML saw them."""
    rows: list[tuple[str, ...]] = []
    for node in sorted(facts.gpu_use, key=lambda each: each.node):
        for gpu in node.gpus:
            watched = gpu.sampled_s
            errors = [*(f"Xid {number}" for number in gpu.xids), *([f"{gpu.ecc_errors} ECC"] if gpu.ecc_errors else [])]
            errors += [f"lost for {units.duration(gpu.lost_s)}"] if gpu.lost_s else []
            rows.append(
                (
                    units.clean(node.node, 64),
                    f"{gpu.index} {units.clean(gpu.name, 40)}".strip(),
                    units.percent(gpu.utilization_s / watched / 100) if watched else "-",
                    units.percent(gpu.idle_s / watched) if watched else "-",
                    f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "-",
                    f"{gpu.memory_gb:.1f} GB",
                    f"{gpu.temperature_c:.0f} °C",
                    units.listed(errors) or "none",
                )
            )
    return rows[:MOST_GPUS]


def environment_rows(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is recorded beyond what is shown elsewhere: packages, driver, CUDA, image, variables."""
    rows = []
    for key, value in _flat({name: value for name, value in info.items() if name not in SHOWN_ELSEWHERE}):
        if value not in (None, "", [], {}):
            rows.append((units.clean(key, 120), units.clean(value)))
    return rows[:400]


def config_section(facts: RunFacts) -> Section:
    """Return the section of the config: what differs from the defaults, and all of it."""
    title = "Config"
    if facts.config is None:
        return Section("config", title, missing="The config cannot be read.")
    changed = facts.changed_settings
    rows = [(units.clean(key, 120), setting_text(value), setting_text(default)) for key, default, value in changed]
    differs = grid("Fields that differ from the defaults", ("field", "value", "default"), rows[:MOST_SETTINGS])
    everything = [(units.clean(key, 120), setting_text(value)) for key, value in _flat(facts.config)]
    whole = grid("All fields", ("field", "value"), everything[:MOST_SETTINGS], folded=True)
    about = f"{units.plural(len(changed), 'field')} differ{'s' if len(changed) == 1 else ''} from the defaults."
    return Section("config", title, about, grids=(differs, whole) if rows else (whole,))


def setting_text(value: Any) -> str:
    """Return a value of a config as it is written in YAML's flow style, without secrets."""
    if value is MISSING:
        return "(no such field)"
    if isinstance(value, str):
        return units.clean(value) or '""'
    return units.clean(units.json_words(value))


def _flat(value: Any, where: str = "", depth: int = 0) -> Iterable[tuple[str, Any]]:
    """Yield dotted keys and values; what is nested very deep stays as it is."""
    if isinstance(value, Mapping) and value and depth < 5:
        for key, each in value.items():
            yield from _flat(each, f"{where}.{key}" if where else str(key), depth + 1)
    elif isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        yield where, ", ".join(map(str, value[:50]))
    else:
        yield where, value
