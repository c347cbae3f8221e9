"""Where the time of runs went, in words for a person."""

from __future__ import annotations

from collections.abc import Mapping

from slurmtrain.cli.columns import one_line
from slurmtrain.cli.units import hours_of, percent
from slurmtrain.report.goodput.causes import Cause, Goodput
from slurmtrain.runs.gpu_use import GpuTotals
from slurmtrain.system.durations import roughly

NAMES = {
    Cause.PRODUCTIVE: "productive",
    Cause.STARTUP: "start-up",
    Cause.CHECKPOINT: "checkpoints",
    Cause.EVALUATION: "evaluation",
    Cause.REDONE: "redone",
    Cause.HUNG: "hung",
    Cause.LOST: "lost steps",
    Cause.IDLE_END: "idle at the end",
    Cause.BETWEEN: "between attempts",
    Cause.UNKNOWN: "unknown",
    Cause.QUEUE: "queue",
    Cause.STOPPED: "stopped",
}
REASONS_SHOWN, XIDS_SHOWN = 3, 4  # in a line
LEAST_SHOWN = 0.005  # share of the held time below which a cause is not worth a word


def in_a_line(found: Goodput) -> str:
    """Return a sentence such as "91 % of 2 h 10 min on 8 GPUs (17.3 GPU h): start-up 4 %, ...; queue 12 min"."""
    if not found.segments:
        return ""
    parts = []
    if found.held_s > 0:
        known = found.share is not None
        gpus = f" on {found.gpu_count:.3g} GPU{'' if found.gpu_count == 1 else 's'}" if found.gpu_seconds else ""
        held = f"{roughly(found.held_s)}{gpus}"
        hours = f" ({hours_of(found.gpu_hours)} GPU h)" if found.gpu_seconds else ""
        share = f"{percent(found.share)} of" if known else "not known of"
        if known and found.shares.get(Cause.UNKNOWN, 0.0) >= LEAST_SHOWN:
            share += " what is known of"
        parts.append(f"{share} {held}{hours}{_rest(found)}")
    waited = [
        f"{NAMES[cause]} {roughly(found.seconds[cause])}"
        for cause in (Cause.QUEUE, Cause.STOPPED)
        if found.seconds.get(cause, 0.0) >= 0.5
    ]
    parts += [", ".join(waited)] if waited else []
    if found.lost_gpu_seconds:
        parts.append(f"lost {hours_of(found.lost_gpu_hours)} GPU h: {why_lost(found, at_most=REASONS_SHOWN)}")
    elif found.lost_s:
        most = _most(found.lost_s)[:REASONS_SHOWN]
        parts.append(f"interruptions cost {', '.join(f'{roughly(s)} ({one_line(why)})' for why, s in most)}")
    return "; ".join(parts)


def gpus_in_a_line(found: GpuTotals) -> str:
    """Return a sentence such as "busy 87 % of the time, idle 3 %, 512 W each; Xid 79 on n1 GPU 3"; "" without samples."""
    said = []
    if found.sampled_s > 0:
        power = f", {found.power_w:.0f} W each" if found.power_w else ""
        said.append(
            f"busy {percent((found.utilization or 0.0) / 100)} of the time, idle {percent(found.idle_share)}{power}"
        )
    return "; ".join([*said, *complaints(found)])


def complaints(found: GpuTotals) -> list[str]:
    """Return what GPUs have complained about, in phrases."""
    errors = "error" if found.ecc_errors == 1 else "errors"
    said = [f"{found.ecc_errors} uncorrectable ECC {errors}"] if found.ecc_errors else []
    if found.xids:
        shown = [f"{xid} on {one_line(node)} GPU {gpu}" for node, gpu, xid in found.xids[:XIDS_SHOWN]]
        said.append(f"Xid {', '.join(shown)}")
    if found.lost_s > 0:
        said.append(f"no answer from GPUs for {roughly(found.lost_s)}")
    return said


def _rest(found: Goodput) -> str:
    shares = found.shares
    said = [
        f"{NAMES[cause]} {percent(shares[cause])}"
        for cause in NAMES
        if cause is not Cause.PRODUCTIVE and shares.get(cause, 0.0) >= LEAST_SHOWN
    ]
    return f": {', '.join(said)}" if said else ""


def why_lost(found: Goodput, at_most: int | None = None) -> str:
    """Return the GPU hours lost by cause, the greatest first; without GPUs, the hours."""
    amounts = found.lost_gpu_seconds or found.lost_s
    return ", ".join(f"{one_line(why)} {hours_of(seconds / 3600)}" for why, seconds in _most(amounts)[:at_most])


def _most(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((why, value) for why, value in amounts.items() if value > 0), key=lambda pair: -pair[1])
