"""The checks of one attempt: every rank reads its facts, rank 0 compares them, and all learn its verdict."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from slurmtrain.choices import PreflightMode
from slurmtrain.config.schema import Config
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.rank.addresses import Pauses, look
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.preflight.compare import Finding, Gathered, compare, error_of, without
from slurmtrain.rank.preflight.facts import RankFacts, Readers, gpus_of, node_facts, rank_facts
from slurmtrain.runs.reasons import Event
from slurmtrain.system.files import write_json

log = logging.getLogger(__name__)

MOST_LOGGED = 12  # findings; all are in preflight.json


def run_preflight(
    config: Config, distributed: DistributedContext, context: AttemptContext, readers: Readers | None = None
) -> None:
    """Check what this attempt needs before it trains. All ranks call it together.

    Raises:
        EnvironmentMismatchError: training must not begin; the same on all ranks.
    """
    environment, mode = distributed.environment, config.preflight.mode
    if mode == PreflightMode.OFF:
        return
    began = time.monotonic()
    ranks = _gather(config, distributed, context, readers or Readers())
    facts = Gathered(ranks, str(context.run_dir.path), environment.source == "slurm")
    found: list[Finding] = []
    if ranks:
        try:
            found = compare(facts, config)
        except Exception:  # a mistake of ours here must not end a training
            log.warning("preflight: the facts of the ranks could not be compared", exc_info=True)
    seconds, measured = round(time.monotonic() - began, 3), None
    error = _agree(distributed, found)
    if error is None and mode == PreflightMode.FULL:
        from slurmtrain.rank.preflight.measure import measure, slow

        rates = measure(distributed, {each.rank: each.node for each in ranks})
        if rates is not None:
            measured = rates.summary()
            found += without(slow(rates, config, distributed.device), config.preflight.ignore)
        error = _agree(distributed, found)
    if ranks:
        _record_and_log(config, context, facts, found, record_of(mode, facts, found, seconds, measured))
    if error is not None:
        raise error


def _gather(
    config: Config, distributed: DistributedContext, context: AttemptContext, readers: Readers
) -> Sequence[RankFacts]:
    """Return the facts of all ranks, on rank 0; none on the others."""
    environment = distributed.environment
    leads = environment.local_rank == 0
    own, of_node = rank_facts(config, environment), node_facts(config, context.run_dir, readers) if leads else None
    probe = (readers.folder or context.attempt_dir.path) / "preflight-began.json"
    begin = None
    if environment.rank == 0:
        token = secrets.token_hex(8)
        try:
            write_json(probe, {"token": token}, durable=False)
        except OSError:  # a full disk, say, which is a finding of its own: nobody looks for the file
            token = ""
        begin = json.dumps([token, readers.clock()])
    token, clock_of_rank_0 = json.loads(distributed.broadcast_text(begin))
    if of_node is not None:
        ahead_at_most = readers.clock() - clock_of_rank_0
        after_s = _seconds_until_seen(probe, token, readers.folder_limit_s) if token else 0.0
        node = replace(of_node, folder_after_s=after_s, folder_limit_s=readers.folder_limit_s)
        own = replace(own, of_node=replace(node, clock=(readers.clock(), ahead_at_most)))
    # When the last facts are here, rank 0's clock shows more than any node's did as it sent its own.
    texts = distributed.gather_texts(msgspec.json.encode(own).decode())
    received = readers.clock()
    ranks = [_with_clock(msgspec.json.decode(text, type=RankFacts), received) for text in texts]
    if environment.rank == 0:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    # SLURM's nodes have names of their own. With torchrun a node calls itself as its host is called, and two containers of one
    # image may be called the same.
    count = Counter(name for name, _ in {(each.node, each.node_rank) for each in ranks})
    return [
        each if count[each.node] == 1 else replace(each, node=f"{each.node} (node {each.node_rank})") for each in ranks
    ]


def _seconds_until_seen(path: Path, token: str, limit_s: float) -> float | None:
    """Look for rank 0's file until it is there; None: it is not within the limit."""
    began, pauses = time.monotonic(), Pauses()
    while (waited := time.monotonic() - began) < limit_s:
        with contextlib.suppress(OSError):
            if (look(path) or {}).get("token") == token:
                return round(waited, 3)
        pauses.pause()
    return None


def _with_clock(rank: RankFacts, received: float) -> RankFacts:
    """Replace what a node's clock showed when it sent its facts by how much it is ahead of rank 0's at least."""
    if rank.of_node is None or rank.of_node.clock is None:
        return rank
    sent, ahead_at_most = rank.of_node.clock
    return replace(rank, of_node=replace(rank.of_node, clock=(sent - received, ahead_at_most)))


def _agree(distributed: DistributedContext, found: Sequence[Finding]) -> EnvironmentMismatchError | None:
    """Return on all ranks the error that ends the attempt, by what rank 0 has found; None: it may go on."""
    error = error_of(found)
    text = distributed.broadcast_text(json.dumps([error.message, error.hint, error.nodes]) if error else "")
    if not text:
        return None
    message, hint, nodes = json.loads(text)
    return EnvironmentMismatchError(message, hint=hint, nodes=tuple(nodes), told_all=True)


def _record_and_log(
    config: Config, context: AttemptContext, facts: Gathered, found: Sequence[Finding], record: Mapping[str, Any]
) -> None:
    """Write down and log on rank 0 what was found."""
    file = context.attempt_dir.preflight_file
    try:
        write_json(file, dict(record))
        if found:
            kinds = sorted({str(each.kind) for each in found})
            context.run_dir.event(Event.PREFLIGHT, attempt=context.number, findings=len(found), kinds=kinds)
    except OSError as error:  # a full disk, which is among the findings
        log.warning("preflight: its record cannot be written: %s", error)
    nodes = facts.nodes.values()
    if gpus_of(config) and all(each.gpus is None and each.driver_error is None for each in nodes):
        log.info("preflight: the health of the GPUs is not known, as NVML cannot be asked (pip install nvidia-ml-py)")
    for each in found[:MOST_LOGGED]:
        if not each.fatal:  # the fatal ones are the error
            log.warning("preflight, %s: %s (%s)", each.kind, each.sentence, each.advice)
    if found or config.preflight.mode == PreflightMode.FULL:
        where = f"{len(facts.ranks)} ranks on {len(nodes)} nodes"
        log.info("preflight, %s: %s, findings: %s; see %s", record["mode"], where, len(found) or "none", file)


def record_of(
    mode: str, facts: Gathered, found: Sequence[Finding], seconds: float, measured: dict[str, Any] | None
) -> dict[str, Any]:
    """Return preflight.json of an attempt.

    mode, seconds  of the quick checks
    findings       the fatal first: each `Finding`, with advice and sentence
    ranks          number of ranks
    nodes          for each node: its first rank, and what is broken on its GPUs
    measured       with mode=full: what was measured
    """
    return {
        "mode": str(mode),
        "seconds": seconds,
        "ranks": len(facts.ranks),
        "findings": [each.values() for each in found],
        "nodes": [
            {
                "node": rank.node,
                "rank": rank.rank,
                "broken": [words for gpu in node.gpus or () if (words := gpu.broken)],
            }
            for rank in facts.ranks
            if (node := rank.of_node) is not None
        ],
        "measured": measured,
    }
