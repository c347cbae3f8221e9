"""plan: memory, time, communication, checkpoints and cost of a run, by arithmetic, before anything is submitted."""

from __future__ import annotations

import re
from dataclasses import replace

from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.plan.calibration import Calibration, calibrate
from slurmtrain.cli.plan.json_object import plan_object, search_object
from slurmtrain.cli.plan.search_text import print_search
from slurmtrain.cli.plan.text import print_plan
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.elastic import at_most
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.planner.fit import in_gb
from slurmtrain.planner.plan import Candidate, Plan, check_plannable, fewest_of, plan_of, search

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    tokens = _count(arguments.options["--tokens"]) if "--tokens" in arguments.options else None
    asked, _ = compose_and_validate(arguments)
    config = at_most(asked)
    dims = parallel_dims_of(config)
    check_plannable(config)
    calibration = calibrate(arguments.options["--from"], config) if "--from" in arguments.options else None
    plan = replace(_plan(config, dims, tokens, calibration), fewest=fewest_of(asked))
    found: list[Candidate] | None = None
    if "--search" in arguments.options:
        found = search(config, calibration.measured if calibration else None)
        _refuse_if_none_fits(found, plan)
    if "--json" in arguments.options:
        print_json(plan_object(plan, calibration) | ({} if found is None else {"search": search_object(plan, found)}))
        return 0
    if found is not None:
        print_search(plan, found)
    else:
        print_plan(plan, calibration)
    return 0


def _refuse_if_none_fits(found: list[Candidate], plan: Plan) -> None:
    if not found:
        limit = "" if plan.memory_limit is None else f" into {in_gb(plan.memory_limit)} GB"
        raise ConfigError(
            f"no layout of {plan.dims.world_size} ranks fits{limit}", hint="more nodes, or a smaller model or batch"
        )


def _plan(config: Config, dims: ParallelDims, tokens: int | None, calibration: Calibration | None) -> Plan:
    if calibration is None:
        return plan_of(config, dims, tokens=tokens)
    size = plan_of(config, dims).saving.size
    write, stall = calibration.write_per_byte_s, calibration.stall_per_byte_s
    return plan_of(
        config,
        dims,
        tokens=tokens,
        measured=calibration.measured,
        write_s=None if write is None else write * size,
        stall_s=None if stall is None else stall * size / config.world_size,
    )


def _count(text: str) -> int:
    """Return a number of tokens: 15T, 1.5e12, 300_000_000."""
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(found[1].replace("_", "")) * SUFFIXES[found[2]] if found is not None else 0.0
    if not 1 <= count < 1e18:
        raise UsageError(
            f"--tokens {text}: expected a number of tokens, at least 1 and below 1e18",
            hint="--tokens 15T, 300B or 1.5e12",
        )
    return round(count)
