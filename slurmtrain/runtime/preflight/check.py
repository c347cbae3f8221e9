"""The checks of one attempt: every rank reads its facts, rank 0 compares them, and all hear its verdict."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from slurmtrain.choices import Backend, JobKind, PreflightMode
from slurmtrain.config.launched_program import node_shape
from slurmtrain.config.schema import Config
from slurmtrain.errors import PreflightError
from slurmtrain.runs.events import Event
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.preflight.compare import Expected, compare
from slurmtrain.runtime.preflight.exchange import Exchange
from slurmtrain.runtime.preflight.facts import GatheredFacts, Message, NodeFacts, gathered
from slurmtrain.runtime.preflight.findings import Finding, error_of, without
from slurmtrain.runtime.preflight.readers import NodeReaders, Readers, gpus_of, rank_facts
from slurmtrain.runtime.preflight.shared_folder import OF_RANK_0, SharedFolder
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json
from slurmtrain.system.redaction import redacted

log = logging.getLogger(__name__)

MOST_TOLD = 12  # findings that are logged; all are in preflight.json


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
    environment, mode = distributed.environment, config.preflight.mode
    if mode == PreflightMode.OFF:
        return
    if environment.world_size > 1 and distributed.store_address is None:
        log.info("preflight: the ranks have met in a way that leaves no store in which facts could be compared")
        return
    # A new connection would take a fifth of a second. The groups have no use for this one before the first step.
    store = distributed.store or (distributed.connect_to_store() if environment.world_size > 1 else dist.HashStore())
    exchange = Exchange(
        dist.PrefixStore(f"preflight-{context.number}", store),
        environment.world_size,
        float(config.cluster.rendezvous_timeout_s),
        stop_requested,
    )
    began = time.monotonic()
    facts = _gather(config, environment, context, readers or Readers(), exchange)
    found: list[Finding] = []
    if facts is not None:
        try:
            found = compare(facts, expected_of(config, context, environment))
        except Exception:  # a mistake of ours here must not end a training
            log.warning("preflight: the facts of the ranks could not be compared", exc_info=True)
    seconds, measured = round(time.monotonic() - began, 3), None
    error = _agree(exchange, environment, "verdict", found)
    if error is None and mode == PreflightMode.FULL:
        from slurmtrain.runtime.preflight.measure import measure, slow, stated_by

        rates = measure(distributed, {each.rank: each.node for each in facts.ranks} if facts is not None else None)
        if rates is not None:
            measured = rates.summary()
            found += without(slow(rates, stated_by(config, distributed.device)), config.preflight.ignore)
        error = _agree(exchange, environment, "verdict on rates", found)
    if facts is not None:
        _tell(config, context, facts, found, record_of(mode, facts, found, seconds, measured), time.monotonic() - began)
    if error is not None:
        raise error


def _gather(
    config: Config, environment: Environment, context: AttemptContext, readers: Readers, exchange: Exchange
) -> GatheredFacts | None:
    """Return the facts of all ranks, on rank 0; None on the others."""
    leads = environment.local_rank == 0
    node_readers = NodeReaders(config, environment, context.run_dir, readers) if leads else None
    own, node = rank_facts(config, environment), None
    path = readers.folder or context.attempt_dir.path / "preflight"
    error = None
    if environment.rank == 0:
        token = secrets.token_hex(8)
        error = SharedFolder(path, token).write(OF_RANK_0)
        exchange.send("begin", json.dumps([token, readers.clock()]))
    if node_readers is not None:
        token, began = json.loads(exchange.receive("begin"))
        ahead_at_most = readers.clock() - began
        folder = SharedFolder(path, token, readers.folder_limit_s)
        if environment.rank != 0:
            error = folder.write(f"node-{environment.node_rank}")
        node = replace(node_readers.facts(), folder=folder.look(error))
        node = replace(node, clock=(readers.clock(), ahead_at_most))
    exchange.send(f"facts/{environment.rank}", Message(own, node).encode())
    if environment.rank != 0:
        return None
    messages = [Message.decode(each) for each in exchange.collect("facts")]
    received = readers.clock()
    others = {f"node-{number}": number for number in range(1, len(environment.nodes))}
    unseen = [others[name] for name in folder.missing(others)]
    return gathered([replace(each, node=_with_clock(each.node, received)) for each in messages], unseen)


def _with_clock(node: NodeFacts | None, received: float) -> NodeFacts | None:
    """Replace what a node's clock showed when it sent its facts by how much it is ahead of rank 0's at least."""
    if node is None or node.clock is None:
        return node
    sent, ahead_at_most = node.clock
    return replace(node, clock=(sent - received, ahead_at_most))


def _agree(exchange: Exchange, environment: Environment, key: str, found: Sequence[Finding]) -> PreflightError | None:
    """Return on all ranks the error that ends the attempt, by what rank 0 has found; None: it may go on."""
    if environment.rank == 0:
        error = error_of(found)
        exchange.send(key, json.dumps(None if error is None else [error.message, error.hint, error.nodes]))
    words = json.loads(exchange.receive(key))
    if words is None:
        return None
    message, hint, nodes = words
    return PreflightError(message, hint=hint, nodes=tuple(nodes), told_all=True)


def _tell(
    config: Config,
    context: AttemptContext,
    facts: GatheredFacts,
    found: Sequence[Finding],
    record: dict[str, Any],
    seconds: float,
) -> None:
    """Write down and log on rank 0 what was found."""
    attempt_dir = context.attempt_dir
    threading.Thread(  # one file for each node takes its time
        target=shutil.rmtree, args=(attempt_dir.path / "preflight", True), name="preflight", daemon=True
    ).start()
    try:
        write_json(attempt_dir.preflight_file, redacted(record))
        if found:
            kinds = sorted({str(each.kind) for each in found})
            context.run_dir.event(Event.PREFLIGHT, attempt=context.number, findings=len(found), kinds=kinds)
    except OSError as error:  # a full disk, which is among the findings
        log.warning("preflight: its record cannot be written: %s", error)
    if gpus_of(config) and all(each.gpus is None and each.driver_error is None for each in facts.nodes):
        log.info(
            "preflight: the health of the GPUs is not known, because NVML cannot be asked (pip install nvidia-ml-py)"
        )
    for each in found[:MOST_TOLD]:
        if not each.fatal:  # the fatal ones are the error
            log.warning("preflight, %s: %s (%s)", each.kind, each.sentence, each.advice)
    if len(found) > MOST_TOLD:
        log.warning("preflight: %d more findings in %s", len(found) - MOST_TOLD, attempt_dir.preflight_file)
    if found or config.preflight.mode == PreflightMode.FULL:
        log.info(
            "preflight, %s: %d ranks on %d nodes, findings: %s, in %.2f s",
            config.preflight.mode,
            len(facts.ranks),
            len(facts.nodes),
            len(found) or "none",
            seconds,
        )


def record_of(
    mode: str, facts: GatheredFacts, found: Sequence[Finding], seconds: float, measured: dict[str, Any] | None
) -> dict[str, Any]:
    """Return preflight.json of an attempt.

    mode, seconds  of the quick checks
    findings       the fatal first: kind, nodes, ranks, value, expected, advice, fatal, fault, pair, sentence
    ranks          number of ranks
    nodes          for each node: its first rank, versions, GPUs and what is broken on them, and when it saw the folder
    measured       with mode=full: what was measured
    """
    return {
        "mode": str(mode),
        "seconds": seconds,
        "ranks": len(facts.ranks),
        "findings": [each.values() for each in found],
        "nodes": [
            {
                "node": node.node,
                "rank": node.rank,
                "versions": dict(node.versions or {}),
                "gpus": None if node.gpus is None else len(node.gpus),
                "gpu": next((gpu.name for gpu in node.gpus or ()), None),
                "broken": [words for gpu in node.gpus or () if (words := gpu.broken)],
                "folder_seen_after_s": None if node.folder is None else node.folder.seen_after_s,
            }
            for node in facts.nodes
        ],
        "measured": measured,
    }


def expected_of(config: Config, context: AttemptContext, environment: Environment) -> Expected:
    """Return what the config asks for."""
    cluster, preflight = config.cluster, config.preflight
    return Expected(
        world_size=environment.world_size,
        gpus_per_node=gpus_of(config),
        cpus_per_task=node_shape(config).threads if cluster.backend != Backend.LOCAL else 1,
        clock_offset_s=preflight.clock_offset_s,
        shared=str(context.run_dir.path),
        managed=environment.source == "slurm",
        alone=config.job.kind != JobKind.COMMAND and config.sweep.pack == 1,
        ignored=tuple(preflight.ignore),
    )
