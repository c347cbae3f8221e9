"""Hydra's global state: put aside while one of our configs is composed, and put back as it was."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator

_one_thread = threading.RLock()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Compose configs of ours without changing the global state of a program that uses Hydra, or the names of its configs.

    One thread at a time does so, since what is put aside belongs to the whole process.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    its_own = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)
    with _one_thread:
        program, names = Singleton._instances, copy.copy(ConfigStore.instance().repo)
        Singleton._instances = {kind: each for kind, each in program.items() if kind not in its_own}
        try:
            yield
        finally:
            Singleton._instances = program
            ConfigStore.instance().repo = names
