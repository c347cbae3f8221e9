"""The random number generators of a rank, as an object of a checkpoint."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The random number generators of this rank: Python, torch on the CPU, and the current GPU.

    numpy's global generator is included if numpy is loaded. When the world size changes, a rank without saved state
    keeps the state that its seed gave it.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy = _loaded_numpy()
        if numpy is not None:
            name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
            state["numpy"] = [name, keys.tolist(), position, has_gauss, gauss]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        numpy = _loaded_numpy()
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(tuple(state["numpy"]))


RANDOM_STATE = RandomState()


def _loaded_numpy() -> Any:
    return sys.modules.get("numpy")
