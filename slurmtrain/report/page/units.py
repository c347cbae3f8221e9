"""Numbers as a person reads them: five digits at most, with a unit, and never a control character."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from slurmtrain.system import records
from slurmtrain.system.redaction import redact

UNKNOWN = "not known"
LONGEST_TEXT = 400  # characters of one value that are shown
TOO_DEEP = "(nested too deep to be shown)"
MOST_READ = 20_000  # and that are looked at
METRICS = {  # words, and the unit
    "loss": ("training loss", "nats per token"),
    "valid_loss": ("validation loss", "nats per token"),
    "lr": ("learning rate", ""),
    "grad_norm": ("gradient norm", ""),
    "param_norm": ("parameter norm", ""),
    "tokens_per_s": ("tokens per second", "tokens/s"),
    "samples_per_s": ("samples per second", "samples/s"),
    "tokens_per_s_per_gpu": ("tokens per second and GPU", "tokens/s"),
    "tflops_per_gpu": ("achieved TFLOP/s per GPU", "TFLOP/s"),
    "mfu": ("model FLOPs utilisation (MFU)", "share of the peak"),
    "mfu_attended": ("only attention within documents counted", "share of the peak"),
    "memory_allocated_gb": ("memory, allocated", "GiB"),
    "memory_reserved_gb": ("memory, reserved", "GiB"),
    "step_time_s": ("time of a step", "s"),
    "data_wait_s": ("wait for data", "s"),
    "time_data_s": ("wait for data", "s"),
    "time_forward_backward_s": ("forward and backward", "s"),
    "time_communication_s": ("communication, not hidden", "s"),
    "time_optimizer_s": ("optimiser", "s"),
    "time_checkpoint_s": ("checkpoint", "s"),
    "time_evaluation_s": ("evaluation", "s"),
    "time_other_s": ("other", "s"),
    "bits_per_byte": ("bits per byte", "bits per byte"),
    "valid_bits_per_byte": ("validation bits per byte", "bits per byte"),
}
_SUFFIXES = {"_s": "s", "_gb": "GB", "_mb": "MB", "_ms": "ms", "_loss": "nats per token", "_percent": "%", "_w": "W"}


def name_of(metric: str) -> str:
    """Return the words for a metric; one that nobody here knows has its own name."""
    if metric in METRICS:
        return METRICS[metric][0]
    if metric.startswith("valid_"):  # an evaluation's own
        return clean(f"validation {metric.removeprefix('valid_').replace('_', ' ')}", 80)
    return clean(metric, 80)


def unit_of(metric: str) -> str:
    """Return the unit of a metric by its name; "" if it has none, or it is not known."""
    if metric in METRICS:
        return METRICS[metric][1]
    return next((unit for suffix, unit in _SUFFIXES.items() if metric.endswith(suffix)), "")


def clean(text: object, longest: int = LONGEST_TEXT) -> str:
    """Return a value as one line without control characters and secrets, cut where it is very long."""
    try:
        whole = str(text)
    except RecursionError:
        return TOO_DEEP
    shown = records.printable(" ".join(redact(whole[:MOST_READ]).split()))
    # A page is UTF-8, which has no lone surrogates.
    shown = shown.encode(errors="replace").decode()
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def capital(words: str) -> str:
    """Return words with a capital letter at the beginning, as a title has."""
    return words[:1].upper() + words[1:]


def number(value: float | None, unit: str = "") -> str:
    """Format a number with five digits, groups of three, and its unit: "12,345 tokens/s"."""
    if value is None:
        return UNKNOWN
    after = f" {unit}" if unit else ""
    if not math.isfinite(value):
        return f"{value}{after}"
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}{after}"
    if abs(value) >= 1e15 or abs(value) < 1e-3:
        return f"{value:.4g}{after}"
    digits = max(0, 4 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{after}"


def brief(value: float) -> str:
    """Format a number with three digits, as a mean that is not known better."""
    return number(float(f"{value:.3g}"))


def percent(share: float) -> str:
    """Format a share: 81 %, 0.4 %."""
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.0995 else f"{100 * share:.1f} %"


def hours(seconds: float) -> str:
    """Format seconds as hours with three digits: 0.012, 1.25, 12.5, 1,250; and less than 36 s as "under 0.01"."""
    value = seconds / 3600
    if 0 < value < 0.01:
        return "under 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def moment(seconds: float | None) -> str:
    """Format a time in unix seconds as local time, to the second."""
    if seconds is None or not records.is_time(seconds) or seconds == 0:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def plural(count: int, word: str) -> str:
    """Return "1 attempt", "3 attempts"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def listed(words: Iterable[str], most: int = 8) -> str:
    """Return "a, b and c", at most so many of them."""
    found = list(words)
    if len(found) > most:
        return f"{', '.join(found[:most])} and {len(found) - most} more"
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
