"""Objects of a user's own, with torch's two methods for their state."""

from __future__ import annotations

from typing import Any


class Own:
    """Has one value, which it gives by a name."""

    def __init__(self, value: Any):
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, values: Any) -> None:
        self.value = values["value"]


class Bare(Own):
    """Gives its value as its state."""

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, values: Any) -> None:
        self.value = values
