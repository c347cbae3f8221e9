"""Values as text: JSON that every parser accepts, and durations as a person says them.

Python writes NaN and the infinities as words that JSON does not have. Here they are the strings "NaN", "Infinity" and
"-Infinity", as in the JSON of protocol buffers: a loss that diverged is distinct from one that was never measured,
null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """Return a value as JSON text that every parser accepts; a dataclass is an object of its fields and properties."""
    text = json.dumps(_strict(value), indent=1, allow_nan=False, ensure_ascii=False, default=str) + "\n"
    return text.encode(errors="backslashreplace").decode()  # half of a pair of surrogates, which no UTF-8 can hold


def _strict(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        properties = [name for name, each in vars(type(value)).items() if isinstance(each, property)]
        names = [*(field.name for field in dataclasses.fields(value)), *properties]
        value = {name: getattr(value, name) for name in names if not name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# Durations as a person says them.


def roughly(seconds: float) -> str:
    """Format a duration roughly: 40 s, 12 min, 2 h 10 min, 3 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minute} min" if minute else f"{hours} h"
    days, hour = divmod(round(seconds / 3600), 24)
    return f"{days} d {hour} h" if hour else f"{days} d"
