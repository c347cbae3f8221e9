"""The checks of one attempt: every rank reads its facts, rank 0 compares them, and all learn its verdict."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from slurmtrain.choices import PreflightMode
from slurmtrain.config.schema import Config
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.preflight.compare import Finding, Gathered, compare, error_of
from slurmtrain.rank.preflight.facts import RankFacts, gpus_of, node_facts, rank_facts, seconds_until_seen
from slurmtrain.runs.reasons import Event
from slurmtrain.system.files import write_json

log = logging.getLogger(__name__)

MOST_LOGGED = 12  # findings; all are in preflight.json


def run_preflight(config: Config, distributed: DistributedContext, context: AttemptContext) -> None:
    """Check what this attempt needs before it trains. All ranks call it together.

    Raises:
        EnvironmentMismatchError: training must not begin; the same on all ranks.
    """
    environment, mode = distributed.environment, config.preflight.mode
    if mode == PreflightMode.OFF:
        return
    began = time.monotonic()
    ranks = _gather(config, distributed, context)
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
            judged = slow(rates, config, distributed.device)
            found += [each for each in judged if each.kind not in config.preflight.ignore]
        error = _agree(distributed, found)
    if ranks:
        _record_and_log(config, context, facts, found, {"seconds": seconds, "measured": measured})
    if error is not None:
        raise error


def _gather(config: Config, distributed: DistributedContext, context: AttemptContext) -> Sequence[RankFacts]:
    """Return the facts of all ranks, on rank 0; none on the others."""
    environment = distributed.environment
    probe, begin = context.attempt_dir.path / "preflight-began.json", None
    if environment.rank == 0:
        token = secrets.token_hex(8)
        try:
            write_json(probe, {"token": token}, durable=False)
        except OSError:  # a full disk, say, which is a finding of its own: nobody looks for the file
            token = ""
    # All have to be here: a rank that comes late has no other clock for that, nor have those that wait for it.
    distributed.gather_texts("here")
    if environment.rank == 0:
        begin = json.dumps([token, time.time()])
    token, clock_of_rank_0 = json.loads(distributed.broadcast_text(begin))
    ahead_s, own = time.time() - clock_of_rank_0, rank_facts(config, environment)
    if environment.local_rank == 0:
        after_s = seconds_until_seen(probe, token) if token else 0.0
        of_node = node_facts(config, context.run_dir)
        own = replace(own, of_node=replace(of_node, clock_ahead_s=ahead_s, folder_after_s=after_s))
    texts = distributed.gather_texts(msgspec.json.encode(own).decode())
    ranks = [msgspec.json.decode(text, type=RankFacts) for text in texts]
    if environment.rank == 0:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    # SLURM's nodes have names of their own. With torchrun a node calls itself as its host is called, and two containers of one
    # image may be called the same.
    count = Counter(name for name, _ in {(each.node, each.node_rank) for each in ranks})
    return [
        each if count[each.node] == 1 else replace(each, node=f"{each.node} (node {each.node_rank})") for each in ranks
    ]


def _agree(distributed: DistributedContext, found: Sequence[Finding]) -> EnvironmentMismatchError | None:
    """Return on all ranks the error that ends the attempt, by what rank 0 has found; None: it may go on."""
    told = distributed.broadcast_text(msgspec.json.encode(found).decode())
    return error_of(msgspec.json.decode(told, type=list[Finding]))


def _record_and_log(
    config: Config, context: AttemptContext, facts: Gathered, found: Sequence[Finding], more: Mapping[str, Any]
) -> None:
    """Write preflight.json, and log on rank 0 what was found.

    Args:
        more: what else the record has: the seconds of the quick checks, and what was measured.
    """
    file, mode = context.attempt_dir.preflight_file, str(config.preflight.mode)
    record = {
        "mode": mode,
        "ranks": len(facts.ranks),
        "findings": [{**asdict(each), "advice": each.advice, "sentence": each.sentence} for each in found],
        "nodes": [
            {"node": name, "broken": [words for gpu in node.gpus or () if (words := gpu.broken)]}
            for name, node in facts.nodes.items()
        ],
        **more,
    }
    try:
        write_json(file, record)
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
    if found or mode == PreflightMode.FULL:
        where = f"{len(facts.ranks)} ranks on {len(nodes)} nodes"
        log.info("preflight, %s: %s, findings: %s; see %s", mode, where, len(found) or "none", file)
