"""scale: the scaling test as a command: the same training on 1, 2, 4, ... nodes for a few steps each, and what it shows."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from slurmtrain.cli.columns import print_sentence, print_table
from slurmtrain.cli.json_output import fields_of, print_json
from slurmtrain.cli.submit import compose_and_validate, next_steps, submitting_points
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.control.checks import check, warn_of_memory
from slurmtrain.control.submitting import client_of
from slurmtrain.errors import EXIT_REQUEUE, UnreadableRecordError, UsageError
from slurmtrain.planner.scaling import WORTH_IT
from slurmtrain.report.page.units import plural
from slurmtrain.report.scaling import ScalingTest, scaling_test
from slurmtrain.report.status.state import RunStatus
from slurmtrain.report.step_times import StepTimes, read_step_times
from slurmtrain.report.waiting import as_they_end
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep.folder import create_sweep, find_same
from slurmtrain.sweep.jobs import require_own, states_of, submit_arrays
from slurmtrain.sweep.plan import plan_sweep
from slurmtrain.sweep.scaling import parse_sizes, scaling_configs, sizes_up_to
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    cwd = current_folder()
    asked = parse_sizes(arguments.nodes) if arguments.nodes is not None else None
    config, _ = compose_and_validate(arguments)
    sizes = asked or sizes_up_to(config.cluster.node_range.most)
    configs = scaling_configs(config, sizes, strong=arguments.strong, steps=arguments.steps)
    if len(sizes) < 2:
        raise UsageError(
            f"cluster.nodes={config.cluster.nodes} leaves nothing to compare",
            hint="cluster.nodes=8, or --nodes 1,2,4,8",
        )
    for sized in configs:
        check(sized, parallel_dims_of(sized), cwd)
    warn_of_memory(configs[0], parallel_dims_of(configs[0]))
    plan = plan_sweep(configs, cwd)
    client = client_of(plan.first, plan.asking.values())
    sweep = None if arguments.again else find_same(plan)
    if sweep is None:
        varied = [
            {
                "cluster.nodes": str(sized.cluster.nodes),
                "train.global_batch_size": str(sized.train.global_batch_size),
            }
            for sized in configs
        ]
        sweep = create_sweep(
            plan, varied.__getitem__, arguments.overrides, cwd, parallelism=arguments.at_once, again=arguments.again
        )
    require_own(sweep)
    with submitting_points(sweep):
        submit_arrays(sweep, client).check()
    if arguments.no_wait and any(now.alive for now in states_of(sweep).values()):
        print(f"sweep {sweep.id} of {len(sizes)} sizes; the same command shows what it has measured\n  {sweep.path}")
        print(next_steps(f"sweep status {sweep.id}", f"sweep cancel {sweep.id}"))
        return 0
    try:
        for number, (run_dir, now) in enumerate(as_they_end(sweep.run_dirs().values()), 1):
            log.info("%d of %d sizes have ended: run %s %s", number, len(sizes), run_dir.id, now.status)
    except KeyboardInterrupt:
        log.info("the runs go on; the same command waits again, and sweep cancel %s ends them", sweep.id)
        raise
    return _report(sweep, configs, arguments)


def _report(sweep: Sweep, configs: Sequence[Config], arguments: argparse.Namespace) -> int:
    """Print what the sizes have shown; return 0 if all have finished, else 75 if they can be retried."""
    found: list[tuple[str, Config, StepTimes]] = []
    failed: list[dict[str, str]] = []
    states = states_of(sweep)
    for point, config in zip(sweep.points(), configs, strict=True):
        now, times = states[point.run_id], None
        try:
            times = read_step_times(sweep.run_dir(point.run_id)) if now.status == RunStatus.FINISHED else None
        except UnreadableRecordError as error:
            log.warning("%s", error.message)
        if times is None:
            sentence = f"{config.cluster.nodes} nodes: {now.status}: {now.explanation}"
            failed.append({"run": point.run_id, "sentence": sentence})
        else:
            found.append((point.run_id, config, times))
    test = scaling_test(found, strong=arguments.strong) if found else None
    if arguments.json:
        shown = {"sweep": sweep.id, "path": str(sweep.path), "not_measured": failed, "sizes": []}
        if test is not None:
            shown |= fields_of(test, "strong missing doublings bottlenecks planned") | {"sentence": _sentence(test)}
            shown["sizes"] = [fields_of(each, "run_id size times planned_s") for each in test.measurements]
        print_json(shown)
    else:
        if test is not None:
            _print(test)
        for each in failed:
            print(f"not measured: run {each['run']}, {printable(each['sentence'])}")
        if failed:
            print(
                f"these start again with the next line; then the same command\n{next_steps(f'sweep retry {sweep.id}')}"
            )
    return EXIT_REQUEUE if failed else 0


def _print(test: ScalingTest) -> None:
    """Print a row for each size, and what holds up the first one that is not worth it."""
    print(
        f"scaling, {'strong: the same global batch' if test.strong else 'weak: the global batch grows with the nodes'}"
    )
    shown = [["", "", "", ""]]
    for doubling, planned, found in zip(test.doublings, test.planned, test.bottlenecks, strict=True):
        cause = "" if found is None else f"{found.kind}{f' ({found.axis})' if found.axis else ''} +{found.share:.0%}"
        expected = "" if planned is None else f"{planned.efficiency:.1%}"
        shown.append([f"{doubling.efficiency:.1%}", f"{doubling.total:.1%}", expected, cause])
    rows = []
    for each, cells in zip(test.measurements, shown, strict=True):
        sizes = (each.nodes, each.config.world_size, each.config.train.global_batch_size)
        rows.append([*map(str, sizes), f"{each.times.step_s:.4g} s", *cells])
    first = f"against {test.measurements[0].nodes}"
    print_table(["nodes", "ranks", "batch", "step", "efficiency", first, "planned", "costs more"], rows)
    print_sentence(_sentence(test), 0)
    if test.why_no_plan is not None:
        print(f"note: there is no plan to compare with: {test.why_no_plan}")
    if test.missing:
        print(f"note: not measured by every run: {', '.join(test.missing)}")


def _sentence(test: ScalingTest) -> str:
    """Say which sizes are worth it, and what the first bottleneck is."""
    if not test.doublings:
        return "one size alone says nothing of how it scales"
    below = test.first_below
    if below is None:
        worst = min(range(len(test.doublings)), key=lambda index: test.doublings[index].efficiency)
        text, found = f"every size reaches at least {WORTH_IT:.0%} at a doubling of the nodes", test.bottlenecks[worst]
        nodes = test.doublings[worst].after.nodes
        return text if found is None else f"{text}. What costs most on {nodes} nodes: {found.sentence}"
    doubling, found = test.doublings[below], test.bottlenecks[below]
    why = f". The first bottleneck: {found.sentence} ({found.share:.0%} of a step)" if found is not None else ""
    return (
        f"using more than {plural(doubling.before.nodes, 'node')} is not worth it: {doubling.after.nodes} reach "
        f"{doubling.efficiency:.0%} of what they could, below {WORTH_IT:.0%} for each doubling{why}"
    )
