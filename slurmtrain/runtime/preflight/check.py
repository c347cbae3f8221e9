"""The checks of one attempt: every rank reads its facts, rank 0 compares them, and all hear its verdict."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurmtrain.choices import Backend, JobKind, PreflightMode
from slurmtrain.config.launched_program import node_shape
from slurmtrain.config.schema import Config
from slurmtrain.errors import PreflightError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.events import Event
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.preflight.compare import compare
from slurmtrain.runtime.preflight.exchange import Exchange
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts, Message, NodeFacts, RankFacts, gathered
from slurmtrain.runtime.preflight.findings import Finding, error_of, without
from slurmtrain.runtime.preflight.readers import (
    NodeReaders,
    Readers,
    disks_of,
    end,
    gpus_of,
    interface_of,
    rank_facts,
    with_clock,
)
from slurmtrain.runtime.preflight.shared_folder import WORD, SharedFolder
from slurmtrain.runtime.preflight.waiting import begin
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json
from slurmtrain.system.gpu_health import words_of
from slurmtrain.system.redaction import redacted

log = logging.getLogger(__name__)

MOST_TOLD = 12  # findings that are logged; all are in preflight.json


@dataclass(frozen=True)
class Verdict:
    """What the checks have found, the same on all ranks.

    Attributes:
        sentence, hint: of the error that ends the attempt; None: training may begin.
        nodes: the nodes at fault, if only nodes are.
    """

    sentence: str | None = None
    hint: str | None = None
    nodes: tuple[str, ...] = ()

    @property
    def error(self) -> PreflightError | None:
        """The error that every rank raises."""
        if self.sentence is None:
            return None
        return PreflightError(self.sentence, hint=self.hint, nodes=self.nodes, told_all=True)

    @classmethod
    def of(cls, found: Sequence[Finding]) -> Verdict:
        """Return the verdict on these findings."""
        error = error_of(found)
        return cls() if error is None else cls(error.message, error.hint, error.nodes)

    def encode(self) -> str:
        """Return it as JSON."""
        return json.dumps([self.sentence, self.hint, list(self.nodes)])

    @classmethod
    def decode(cls, text: str) -> Verdict:
        """Return what `encode` has made."""
        sentence, hint, nodes = json.loads(text)
        return cls(sentence, hint, tuple(nodes))


def run_preflight(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    readers: Readers | None = None,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Check what this attempt needs before it trains. All ranks call it together.

    Args:
        stop_requested: returns whether this rank was told to stop.

    Raises:
        PreflightError: training must not begin; the same on all ranks.
        LostPeersError, RendezvousError: a rank went away, or did not come.
        StopDuringStartError: this rank was told to stop while it waited for another one.
    """
    if config.preflight.mode == PreflightMode.OFF:
        return
    if distributed.environment.world_size > 1 and distributed.store_address is None:
        log.info("preflight: the ranks have met in a way that leaves no store in which facts could be compared")
        return
    Preflight(config, distributed, context, readers or Readers(), stop_requested).run()


class Preflight:
    """The checks of one attempt, seen from one rank."""

    def __init__(
        self,
        config: Config,
        distributed: DistributedContext,
        context: AttemptContext,
        readers: Readers,
        stop_requested: Callable[[], bool],
    ):
        self._config, self._distributed, self._context, self._readers = config, distributed, context, readers
        self._environment = distributed.environment
        self._leads = self._environment.local_rank == 0
        self._exchange: Exchange | None = None
        if self._environment.world_size > 1:
            timeout_s = float(config.cluster.rendezvous_timeout_s)
            # A new connection would take a fifth of a second. The groups have no use for this one before the first step.
            connected = distributed.store or distributed.connect_to_store()
            store = dist.PrefixStore(f"attempt-{context.number}", connected)
            rank, world_size = self._environment.rank, self._environment.world_size
            self._exchange = Exchange(store, rank, world_size, timeout_s, stop_requested)

    def run(self) -> None:
        """Read, compare, and raise what ends the attempt."""
        began = time.monotonic()
        facts = self._gather()
        found: list[Finding] = []
        verdict = Verdict()
        if facts is not None:
            found = self._compare(facts)
            verdict = Verdict.of(found)
        seconds = round(time.monotonic() - began, 3)
        verdict = self._told("verdict", verdict)
        measured: dict[str, Any] | None = None
        if verdict.error is None and self._config.preflight.mode == PreflightMode.FULL:
            from slurmtrain.runtime.preflight.measure import measure

            more, measured = measure(self._config, self._distributed, self._exchange)
            if facts is not None:
                found += without(more, self._config.preflight.ignore)
                verdict = Verdict.of(found)
            verdict = self._told("verdict-full", verdict)
        if facts is not None:
            self._tell(facts, found, seconds, round(time.monotonic() - began, 3), measured)
        if verdict.error is not None:
            raise verdict.error

    def _compare(self, facts: GatheredFacts) -> list[Finding]:
        """Return what is found. A mistake of ours here must not end a training."""
        try:
            return compare(facts, expected_of(self._config, self._context, self._environment))
        except Exception:
            log.warning("preflight: the facts of the ranks could not be compared", exc_info=True)
            return []

    def _gather(self) -> GatheredFacts | None:
        """Return the facts of all ranks, on rank 0; None on the others."""
        environment, distributed = self._environment, self._distributed
        node_readers = None
        if self._leads:
            node_readers = NodeReaders(
                self._config,
                environment,
                self._context.run_dir,
                self._readers,
                interface=interface_of(environment, distributed.store_address),
            )
        own = rank_facts(environment, str(distributed.device), _gpus_seen(self._config), self._readers)
        own = replace(own, gpu_numa_node=_numa_node_of(distributed.device))
        folder, error = self._begin_with_folder()
        node = node_readers.facts() if node_readers is not None else None
        clock = self._common_moment()
        if node is not None:
            node = with_clock(node, clock)
        if node is not None and folder is not None:
            node = replace(node, folder=folder.look(error))
        own = self._with_other_packages(own, node)
        if self._exchange is None:
            return gathered([Message(own, node)])
        self._exchange.send("facts", Message(own, node).encode())
        if environment.rank != 0:
            return None
        unseen = self._unseen(folder) if folder is not None and not environment.single_node else ()
        return gathered(map(Message.decode, self._exchange.collect("facts")), unseen)

    # Parts of it.

    def _begin_with_folder(self) -> tuple[SharedFolder | None, str | None]:
        """Write this node's file into the folder of the attempt; it is seen by the others after the common moment."""
        if not self._leads:
            return None, None
        token = secrets.token_hex(8)
        if self._exchange is not None and not self._environment.single_node:
            if self._environment.rank == 0:
                self._exchange.send("token", token)
            else:
                token = self._exchange.receive("token", 0)
        folder = SharedFolder(folder_of(self._context.attempt_dir), token, limit_s=self._readers.folder_limit_s)
        name = WORD if self._environment.rank == 0 else f"node-{self._environment.node_rank}"
        return folder, folder.write(name)

    def _common_moment(self) -> tuple[float, float] | None:
        """Return what the clock shows before and after a moment at which all ranks are in one barrier."""
        if self._exchange is None or self._distributed.control_group is None or self._environment.single_node:
            return None
        self._exchange.meet("clock")  # so that none waits long in the barrier, in which it hears no signal
        before = self._readers.clock()
        dist.barrier(group=self._distributed.control_group)
        return before, self._readers.clock()

    def _with_other_packages(self, own: RankFacts, node: NodeFacts | None) -> RankFacts:
        """Add the packages in which this rank differs from the first one of its node, which are seldom any."""
        if self._exchange is None or self._environment.local_world_size == 1:
            return own
        key = f"packages-{self._environment.node_rank}"
        if node is not None:
            self._exchange.send(key, json.dumps([own.packages, dict(node.packages or {})]), of=0)
            return own
        digest, packages = json.loads(self._exchange.receive(key, 0))
        if digest == own.packages or not packages:
            return own
        until = time.monotonic() + self._readers.limit_s
        mine = end(begin(lambda: dict(self._readers.process().packages)), "the packages", until)
        if mine is None:  # a slow disk
            return own
        differs = {name: mine.get(name, "none") for name in {*mine, *packages} if mine.get(name) != packages.get(name)}
        return replace(own, differs=differs or None)

    def _unseen(self, folder: SharedFolder) -> list[int]:
        """Return the numbers of the nodes whose file rank 0 does not see in the shared folder."""
        numbers = {f"node-{index}": index for index in range(1, len(self._environment.nodes))}
        return [numbers[name] for name in folder.missing(list(numbers))]

    def _told(self, what: str, verdict: Verdict) -> Verdict:
        """Return rank 0's verdict on all ranks."""
        if self._exchange is None:
            return verdict
        if self._environment.rank == 0:
            self._exchange.send(what, verdict.encode())
            return verdict
        return Verdict.decode(self._exchange.receive(what, 0))

    def _tell(
        self,
        facts: GatheredFacts,
        found: Sequence[Finding],
        seconds: float,
        all_seconds: float,
        measured: dict[str, Any] | None,
    ) -> None:
        """Write down and log on rank 0 what was found."""
        threading.Thread(  # one file for each node takes its time
            target=SharedFolder(folder_of(self._context.attempt_dir), "").remove, name="preflight", daemon=True
        ).start()
        record = record_of(self._config.preflight.mode, facts, found, seconds, measured)
        attempt_dir = self._context.attempt_dir
        try:
            write_json(attempt_dir.preflight_file, redacted(record))
            if found:
                kinds = sorted({str(each.kind) for each in found})
                self._context.run_dir.event(
                    Event.PREFLIGHT, attempt=self._context.number, findings=len(found), kinds=kinds
                )
        except OSError as error:  # a full disk, which is among the findings
            log.warning("preflight: its record cannot be written: %s", error)
        for each in found[:MOST_TOLD]:
            if not each.fatal:  # the fatal ones are the error
                log.warning("preflight, %s: %s (%s)", each.kind, each.sentence, each.advice)
        if len(found) > MOST_TOLD:
            log.warning("preflight: %d more findings in %s", len(found) - MOST_TOLD, attempt_dir.preflight_file)
        nodes, ranks = len(facts.nodes), len(facts.ranks)
        if not found and self._config.preflight.mode == PreflightMode.QUICK:
            return
        log.info(
            "preflight, %s: %d rank%s on %d node%s, %s, in %.2f s",
            self._config.preflight.mode,
            ranks,
            "" if ranks == 1 else "s",
            nodes,
            "" if nodes == 1 else "s",
            f"{len(found)} finding{'' if len(found) == 1 else 's'}" if found else "nothing found",
            all_seconds,
        )


def folder_of(attempt_dir: AttemptDir) -> Path:
    """Return the folder in which the nodes of an attempt look for each other's files."""
    return attempt_dir.path / "preflight"


def record_of(
    mode: str, facts: GatheredFacts, found: Sequence[Finding], seconds: float, measured: dict[str, Any] | None
) -> dict[str, Any]:
    """Return preflight.json of an attempt.

    mode, seconds  of the quick checks
    findings       the fatal first: kind, nodes, ranks, value, expected, advice, fatal, fault, pair, sentence
    ranks          number of ranks
    nodes          for each node: its first rank, versions, GPUs and what is broken on them, free memory, disks, interface and
                   folder
    measured       with mode=full: what was measured
    """
    return {
        "mode": str(mode),
        "seconds": seconds,
        "ranks": len(facts.ranks),
        "findings": [each.values() for each in found],
        "nodes": [_node_values(each) for each in facts.nodes],
        "measured": measured,
    }


def _node_values(node: NodeFacts) -> dict[str, Any]:
    folder = node.folder
    return {
        "node": node.node,
        "rank": node.rank,
        "versions": dict(node.versions or {}),
        "gpus": None if node.gpus is None else len(node.gpus),
        "gpu": next((gpu.name for gpu in node.gpus or ()), None),
        "broken": [
            words
            for gpu in node.gpus or ()
            if (words := words_of(gpu.index, gpu.ecc_errors or 0, bool(gpu.remap_pending), bool(gpu.remap_failed)))
        ],
        "memory_gb": node.memory_gb,
        "disks_gb": {path: disk.free_gb for path, disk in (node.disks or {}).items()},
        "interface": node.interface,
        "interface_mbit": node.interface_mbit,
        "folder_seen_after_s": None if folder is None else folder.seen_after_s,
    }


def expected_of(config: Config, context: AttemptContext, environment: Environment) -> Expected:
    """Return what the config asks for."""
    cluster, preflight = config.cluster, config.preflight
    return Expected(
        world_size=environment.world_size,
        gpus_per_node=gpus_of(config),
        cpus_per_task=node_shape(config).threads if cluster.backend != Backend.LOCAL else 1,
        mem_per_node_gb=cluster.mem_per_node_gb,
        min_free_gb=preflight.min_free_gb,
        clock_offset_s=preflight.clock_offset_s,
        shared=(str(disks_of(config, context.run_dir)[0]),),
        managed=environment.source == "slurm",
        alone=config.job.kind != JobKind.COMMAND and config.sweep.pack == 1,
        ignored=tuple(preflight.ignore),
    )


def _gpus_seen(config: Config) -> int | None:
    """Return how many GPUs torch sees; None where none was asked for: looking would take a moment."""
    if gpus_of(config) == 0 or not (torch.version.cuda or torch.version.hip):
        return None
    return torch.cuda.device_count()


def _numa_node_of(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU is attached to; None where it is not known."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
