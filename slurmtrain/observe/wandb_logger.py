"""Weights & Biases: one run, whose id is that of the run directory, over all attempts; online, or in files for `wandb sync`.

No step is logged twice. Online, the server says at which step the run is (resume="allow"). Offline, each attempt writes a
folder of its own in RUN/wandb, which `wandb sync` joins by the run's id; it begins after the last step of the folders before. A
folder that was not closed, since a kill took its writer, may lack some of its last rows: it is moved aside, and its rows are
written again from metrics.jsonl.

A row's `_step` is the step of training. An evaluation that comes later than the row of its step is in the row that follows,
with its own step in `evaluated_step`, over which W&B draws the metrics of evaluations.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import netrc
import os
import shlex
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurmtrain.choices import WandbMode
from slurmtrain.config.schema import WandbConfig
from slurmtrain.errors import ConfigError
from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger
from slurmtrain.system.files import folder_mode, write_json
from slurmtrain.system.records import read_json, typed_or_none

log = logging.getLogger(__name__)

KEY = "WANDB_API_KEY"
KEYS = (KEY, "WANDB_IDENTITY_TOKEN_FILE")
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
SERVERS: tuple[str, ...] = (
    "api.forge.coreweave.com",
    "api.wandb.ai",
)  # two names of W&B's own service: since 0.31, and before
CONNECT_S = 3.0
OPEN_S = 60.0  # to begin a run with the server
FINISH_S = 25.0  # to upload what is left when training has finished
STEP_OF_EVALUATION = "evaluated_step"
MARK = "slurmtrain.json"  # in the folder of an offline attempt that was closed: the last steps in it


def why_offline(wanted: WandbMode, variables: Mapping[str, str]) -> str | None:
    """Decide between online and offline, by what is known on this machine; this may take a few seconds.

    Args:
        variables: the environment, of which WANDB_MODE decides where the config says "auto".

    Returns:
        Half a sentence that says why the numbers go into files for later; None: W&B is given them now.
    """
    asked = variables.get("WANDB_MODE") if wanted == WandbMode.AUTO else str(wanted)
    if asked == "online":
        return None
    if asked in ("offline", "dryrun"):
        return "observe.wandb.mode or WANDB_MODE says so"
    hosts, port = SERVERS, 443
    if url := variables.get("WANDB_BASE_URL"):
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            hosts, port = (parts.hostname or "",), parts.port or (80 if parts.scheme == "http" else 443)
    known = any(variables.get(name) for name in KEYS)
    with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        found = netrc.netrc(variables.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
        known = known or any(host in found or f"{host}:{port}" in found for host in hosts)
    if not known:
        return f"no API key is known here ({KEY}, or a netrc file)"
    if any(variables.get(name) for name in PROXIES):  # only the proxy knows which servers answer
        return None
    for host in hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_S):
            return None
    return "its server cannot be reached from this node"


def variables_of(config: WandbConfig, run: LoggedRun, *, online: bool) -> dict[str, str]:
    """Return the variables by which any program that uses wandb goes on in the run of this id. None is a secret."""
    variables = {
        "WANDB_RUN_ID": run.id,
        "WANDB_RESUME": "allow",
        "WANDB_DIR": str(run.directory),
        "WANDB_PROJECT": config.project or run.name,
        "WANDB_NAME": f"{run.name} {run.id}",
        "WANDB_MODE": "online" if online else "offline",
    }
    if config.entity:
        variables["WANDB_ENTITY"] = config.entity
    if group := config.group or run.sweep:
        variables["WANDB_RUN_GROUP"] = group
    if config.tags:
        variables["WANDB_TAGS"] = ",".join(config.tags)
    return variables


def offline_sentence(directory: Path, why: str) -> str:
    """Say that a run is offline, why, and how its files are sent later, from a machine with internet."""
    return (
        f"Weights & Biases is offline, since {why}; to send the run later: "
        f"wandb sync {shlex.quote(str(directory / 'wandb'))}/offline-run-*"
    )


class WandbLogger(Logger):
    """Logs to W&B. Sends numbers, config and tags; no code, no console output, no media.

    Raises:
        ConfigError: wandb is not installed.
    """

    _opened = False  # in this process

    def __init__(self, config: WandbConfig):
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "observe.wandb.enabled=true, but wandb is not installed where the job runs",
                hint="pip install 'slurmtrain[wandb]'",
            )
        self._config = config
        self._run: Any = None
        self._held, self._row = Held(), -1
        self._defined: set[str] = set()
        self._folder: Path | None = None  # of an offline run
        self.said = ""  # where the numbers go

    def open(self, run: LoggedRun) -> Held:
        import wandb

        if WandbLogger._opened:
            # After the end of its wandb-core, of SLURM's SIGTERM for instance, wandb starts another one only if it is told to
            # forget the first. It says that the connection is lost, and does so.
            with contextlib.suppress(Exception):
                wandb.teardown()
        WandbLogger._opened = True
        why = why_offline(self._config.mode, os.environ)
        online = why is None
        variables = variables_of(self._config, run, online=online)
        (run.directory / "wandb").mkdir(mode=folder_mode(run.directory), exist_ok=True)
        held = Held() if online else begin_offline(run)
        self._run = wandb.init(
            project=variables["WANDB_PROJECT"],
            entity=variables.get("WANDB_ENTITY"),
            id=run.id,
            name=variables["WANDB_NAME"],
            resume="allow",
            reinit="create_new",  # neither a run that somebody else has begun here, nor one that others log to
            dir=str(run.directory),
            mode="online" if online else "offline",
            group=variables.get("WANDB_RUN_GROUP"),
            tags=list(self._config.tags) or None,
            config={name: value for name, value in run.config.items() if name != "secrets"},
            allow_val_change=True,
            save_code=False,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                init_timeout=OPEN_S,
                finish_timeout=FINISH_S,
            ),
        )
        if why is None:
            # What the server has counts, also where an attempt before was offline or was killed.
            if self._run.resumed:
                held = Held(self._run.step - 1, int(self._run.summary.get(STEP_OF_EVALUATION, -1)))
            # What the server lacks of the folders of offline attempts, it now gets from metrics.jsonl.
            for path in (run.directory / "wandb").glob("offline-run-*"):
                move_aside(path, "replaced")
            self.said = f"Weights & Biases: {self._run.url}"
        else:
            self._folder = Path(self._run.dir).parent
            self.said = offline_sentence(run.directory, why)
        log.info("%s", self.said)
        self._held, self._row = held, held.step + 1
        self._run.define_metric(STEP_OF_EVALUATION, hidden=True)
        return held

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._row = max(self._row, step)
        self._run.log(dict(values), step=self._row)
        self._held = Held(step, self._held.evaluated)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=STEP_OF_EVALUATION)
            self._defined.add(name)
        self._row = max(self._row, step)
        self._run.log({**values, STEP_OF_EVALUATION: step}, step=self._row)
        self._held = Held(self._held.step, max(step, self._held.evaluated))

    def close(self, ending: Ending) -> str | None:
        if self._run is None:
            return None
        if ending == Ending.STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == Ending.FINISHED else 1)
        if self._folder is not None:
            write_json(self._folder / MARK, asdict(self._held))
        return self.said


def begin_offline(run: LoggedRun) -> Held:
    """Move folders aside that were not closed, and return the last steps that the others have, or that W&B has been given."""
    folders = sorted((run.directory / "wandb").glob("offline-run-*"))
    held = Held() if folders else run.held
    for path in folders:
        mark = typed_or_none(Held, read_json(path / MARK))
        if mark is None:
            move_aside(path, "incomplete")
        else:
            held = max(held, mark)
    return held


def move_aside(path: Path, why: str) -> None:
    """Give a folder another name, by which nobody sends it."""
    with contextlib.suppress(OSError):  # a shared file system's hiccup
        path.rename(path.with_name(f"{why}-{path.name}"))
