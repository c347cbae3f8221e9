"""scale: the scaling test as a command: the same training on 1, 2, 4, ... nodes for a few steps each, and what it shows."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import counts, print_sentence, print_table, summary
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.plan.json_object import doubling_object
from slurmtrain.cli.plan.sentences import nodes_text
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.control.submitting import check, client_of, warn_of_memory
from slurmtrain.errors import EXIT_REQUEUE, UnreadableRecordError, UsageError
from slurmtrain.planner.scaling import WORTH_IT, Doubling
from slurmtrain.report.scaling import ScalingTest, bars, scaling_test
from slurmtrain.report.scaling_plot import draw
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.step_times import StepTimes, read_step_times
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep import folder as sweeps
from slurmtrain.sweep.create import create_sweep, find_same
from slurmtrain.sweep.jobs import check_submitted, submit_arrays
from slurmtrain.sweep.plan import SweepPlan, plan_sweep
from slurmtrain.sweep.scaling import parse_sizes, scaling_configs, sizes_up_to
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

STEPS = 50
LEAST_STEPS = 10
LOOK_EVERY_S = 5.0


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    options, cwd = arguments.options, current_folder()
    if "--strong" in options and "--weak" in options:
        raise UsageError("--strong and --weak exclude each other", hint="give two commands")
    _check_plot(options.get("--plot"), for_program="--json" in options)
    strong, steps, at_once = "--strong" in options, _steps(options.get("--steps")), _at_once(options.get("--at-once"))
    asked = parse_sizes(options["--nodes"]) if "--nodes" in options else None
    config, _ = compose_and_validate(arguments)
    sizes = asked or sizes_up_to(config.cluster.node_range.most)
    configs = scaling_configs(config, sizes, strong=strong, steps=steps)
    if len(sizes) < 2:
        raise UsageError(
            f"cluster.nodes={config.cluster.nodes} leaves nothing to compare",
            hint="cluster.nodes=8, or --nodes 1,2,4,8",
        )
    for sized in configs:
        check(sized, parallel_dims_of(sized), cwd)
    sweep_plan = plan_sweep(configs, cwd)
    configs = [_frozen(sized, cwd) for sized in configs]
    warn_of_memory(configs[0], parallel_dims_of(configs[0]))
    sweep = _submit(sweep_plan, configs, arguments, cwd, at_once)
    if "--no-wait" in options and not _over(sweeps.states_of(sweep)):
        print(f"sweep {sweep.id} of {len(sizes)} sizes\n  {sweep.path}")
        print(f"  sweep status {sweep.id}   sweep cancel {sweep.id}   the same command shows what it has measured")
        return 0
    states = _wait(sweep, quiet="--json" in options)
    return _report(sweep, states, configs, arguments, strong=strong)


def _check_plot(target: str | None, *, for_program: bool) -> None:
    """Refuse a picture that could not be drawn: it is drawn last, hours later."""
    if target == "-" and for_program:
        raise UsageError("--plot - prints text, which does not go with --json", hint="--plot FILE.png")
    if target not in (None, "-") and Path(str(target)).suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"cannot draw into {target!r}", hint="give a name that ends in .png or .svg, or - for text")


def _frozen(config: Config, cwd: Path) -> Config:
    from slurmtrain.launch.named_paths import with_absolute_paths

    return with_absolute_paths(config, cwd)


def _steps(text: str | None) -> int:
    if text is None:
        return STEPS
    if not text.isdigit() or int(text) < LEAST_STEPS:
        raise UsageError(f"--steps {text}: expected at least {LEAST_STEPS}", hint="the first steps take longer")
    return int(text)


def _at_once(text: str | None) -> int | None:
    if text is not None and (not text.isdigit() or int(text) < 1):
        raise UsageError(f"--at-once {text}: expected a number of sizes", hint="--at-once 1: one after the other")
    return None if text is None else int(text)


def _submit(
    sweep_plan: SweepPlan, configs: Sequence[Config], arguments: Arguments, cwd: Path, at_once: int | None
) -> Sweep:
    """Submit the sizes that have not been submitted, and return their sweep."""
    client = client_of(sweep_plan.first, sweep_plan.asking.values())
    sweep = None if "--again" in arguments.options else find_same(sweep_plan)
    if sweep is None:
        sweep = create_sweep(
            sweep_plan,
            lambda number: {
                "cluster.nodes": str(configs[number].cluster.nodes),
                "train.global_batch_size": str(configs[number].train.global_batch_size),
            },
            arguments.overrides,
            cwd,
            max_array_size=client.max_array_size(),
            parallelism=at_once,
            again="--again" in arguments.options,
        )
    sweeps.require_own(sweep)
    try:
        check_submitted(submit_arrays(sweep, client))
    except KeyboardInterrupt:
        log.info("sweep %s: the same command submits the rest; sweep cancel %s ends it", sweep.id, sweep.id)
        raise
    return sweep


def _over(states: dict[str, RunState]) -> bool:
    return not any(state.alive for state in states.values())


def _wait(sweep: Sweep, *, quiet: bool) -> dict[str, RunState]:
    """Wait until all sizes have ended, and return their states. Ctrl-C ends the waiting, and not the runs."""
    said = ""
    try:
        while not _over(states := sweeps.states_of(sweep)):
            now = summary(counts(states.values()))
            if now != said and not quiet:
                log.info("sweep %s: %s", sweep.id, now)
            said = now
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        log.info("the runs go on; the same command waits again, and sweep cancel %s ends them", sweep.id)
        raise
    return states


def _report(
    sweep: Sweep, states: dict[str, RunState], configs: Sequence[Config], arguments: Arguments, *, strong: bool
) -> int:
    """Print what the sizes have shown; return 0 if all have finished, else 75 if they can be retried."""
    found: list[tuple[str, Config, StepTimes]] = []
    failed: list[tuple[str, str]] = []
    for point, config in zip(sweep.points(), configs, strict=True):
        state, times = states[point.run_id], None
        try:
            times = read_step_times(sweep.run_dir(point.run_id)) if state.status == RunStatus.FINISHED else None
        except UnreadableRecordError as error:
            log.warning("%s", error.message)
        if times is None:
            failed.append((point.run_id, f"{config.cluster.nodes} nodes: {state.status}: {state.explanation}"))
        else:
            found.append((point.run_id, config, times))
    test = scaling_test(found, strong=strong) if found else None
    if "--json" in arguments.options:
        print_json(scaling_object(sweep, test, failed))
    else:
        if test is not None:
            print_test(test)
        for run_id, sentence in failed:
            print(f"not measured: run {run_id}, {printable(sentence)}")
        if failed:
            print(f"sweep retry {sweep.id} starts them again; then the same command")
    if test is not None and "--plot" in arguments.options and len(test.measurements) > 1:
        _draw(test, arguments.options["--plot"], quiet="--json" in arguments.options)
    return EXIT_REQUEUE if failed else 0


def _draw(test: ScalingTest, target: str, *, quiet: bool) -> None:
    if target != "-":
        draw(test, Path(target))
        if not quiet:
            print(f"drawn into {target}")
    else:
        rows = [(f"{each.after.nodes} nodes", each.efficiency) for each in test.doublings]
        print(f"\nefficiency at each size against the one before; | is {WORTH_IT:.0%}\n{bars(rows)}", end="")


# For a person.


def print_test(test: ScalingTest) -> None:
    """Print a row for each size, and what holds up the first one that is not worth it."""
    kind = "strong: the same global batch" if test.strong else "weak: the global batch grows with the nodes"
    print(f"scaling, {kind}")
    rows = []
    for index, each in enumerate(test.measurements):
        doubling = test.doublings[index - 1] if index else None
        planned = test.planned[index - 1] if index else None
        found = test.bottlenecks[index - 1] if index else None
        rows.append(
            [
                str(each.nodes),
                str(each.config.world_size),
                str(each.config.train.global_batch_size),
                f"{each.times.step_s:.4g} s",
                "" if doubling is None else f"{doubling.efficiency:.1%}",
                "" if doubling is None else f"{doubling.total:.1%}",
                "" if planned is None else f"{planned.efficiency:.1%}",
                "" if found is None else f"{found.kind}{f' ({found.axis})' if found.axis else ''} +{found.share:.0%}",
            ]
        )
    first = test.measurements[0].nodes
    print_table(["nodes", "ranks", "batch", "step", "efficiency", f"against {first}", "planned", "costs more"], rows)
    print_sentence(sentence(test), 0)
    if test.why_no_plan is not None:
        print(f"note: there is no plan to compare with: {test.why_no_plan}")
    if test.missing:
        print(f"note: not measured by every run: {', '.join(test.missing)}")


def sentence(test: ScalingTest) -> str:
    """Say which sizes are worth it, and what the first bottleneck is."""
    if not test.doublings:
        return "one size alone says nothing of how it scales"
    below = test.first_below
    if below is None:
        worst = min(range(len(test.doublings)), key=lambda index: test.doublings[index].efficiency)
        text = f"every size is worth it: each reaches at least {WORTH_IT:.0%} at a doubling of the nodes"
        found = test.bottlenecks[worst]
        return text if found is None else f"{text}. What costs most on {_nodes(test, worst)} nodes: {found.sentence}"
    doubling, found = test.doublings[below], test.bottlenecks[below]
    why = f". The first bottleneck: {found.sentence} ({found.share:.0%} of a step)" if found is not None else ""
    return (
        f"using more than {nodes_text(doubling.before.nodes)} is not worth it: {doubling.after.nodes} reach "
        f"{doubling.efficiency:.0%} of what they could, below {WORTH_IT:.0%} for each doubling{why}"
    )


def _nodes(test: ScalingTest, index: int) -> int:
    return test.doublings[index].after.nodes


# For a program.


def scaling_object(sweep: Sweep, test: ScalingTest | None, failed: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a scaling test as `scale --json` prints it.

    sweep, path   of its runs
    strong        whether the global batch is the same at all sizes
    sizes         for each size: run, nodes, ranks, global_batch_size, step_s, parts (seconds by part of a step), mfu and
                  planned_s (of a step, with the rates of the smallest size); null where it is not known
    doublings     for each size but the first: as `more_nodes` of `plan --json`, and bottleneck (kind, axis, share, sentence,
                  measured) and planned (efficiency, total)
    sentence      what it has shown
    missing       parts of a step that not every run has measured
    not_measured  run and sentence of each size that has not finished
    """
    found: dict[str, Any] = {
        "sweep": sweep.id,
        "path": str(sweep.path),
        "not_measured": [{"run": run_id, "sentence": sentence} for run_id, sentence in failed],
    }
    if test is None:
        return found | {"sizes": [], "doublings": [], "sentence": None, "missing": []}
    return found | {
        "strong": test.strong,
        "sizes": [
            {
                "run": each.run_id,
                "nodes": each.nodes,
                "ranks": each.config.world_size,
                "global_batch_size": each.config.train.global_batch_size,
                "step_s": each.times.step_s,
                "parts": dict(each.times.parts),
                "mfu": each.times.mfu,
                "planned_s": each.planned_s,
            }
            for each in test.measurements
        ],
        "doublings": [
            doubling_object(doubling)
            | {"bottleneck": _bottleneck_object(test, index), "planned": _planned_object(planned)}
            for index, (doubling, planned) in enumerate(zip(test.doublings, test.planned, strict=True))
        ],
        "sentence": sentence(test),
        "missing": test.missing,
    }


def _bottleneck_object(test: ScalingTest, index: int) -> dict[str, Any] | None:
    found = test.bottlenecks[index]
    if found is None:
        return None
    return {
        "kind": found.kind,
        "axis": found.axis,
        "share": found.share,
        "sentence": found.sentence,
        "measured": found.measured,
    }


def _planned_object(planned: Doubling | None) -> dict[str, float] | None:
    return None if planned is None else {"efficiency": planned.efficiency, "total": planned.total}
