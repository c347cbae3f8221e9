"""The layouts that `plan --search` has found, as a table."""

from __future__ import annotations

from slurmtrain.cli.columns import print_sentence, print_table
from slurmtrain.cli.plan.quantities import count_text, seconds_text
from slurmtrain.planner.fit import in_gb
from slurmtrain.planner.plan import Candidate, Plan

SHOWN = 10  # layouts of `--search` that are printed


def print_search(plan: Plan, found: list[Candidate]) -> None:
    """Print the fastest of the layouts that fit."""
    rows = []
    for candidate in found[:SHOWN]:
        step = candidate.step
        mfu = ""
        if plan.hardware.peak_flops is not None:
            mfu = f"{step.mfu(plan.hardware.peak_flops):.1%}"
        rows.append(
            [
                seconds_text(step.expected_s),
                count_text(step.tokens_per_s),
                mfu,
                in_gb(candidate.memory),
                f"{step.bubble_share:.1%}" if candidate.dims.pp > 1 else "",
                f"{step.communication_s / step.expected_s:.1%}",
                " ".join(candidate.overrides) or "as it is",
            ]
        )
    count = "1 layout" if len(found) == 1 else f"{len(found)} layouts"
    fits = "fits" if len(found) == 1 else "fit; the fastest by arithmetic first"
    print(f"{count} of {'1 rank' if plan.dims.world_size == 1 else f'{plan.dims.world_size} ranks'} {fits}")
    print_table(["step", "tokens/s", "mfu", "GB", "bubble", "communication", "overrides"], rows)
    shown = f"{min(SHOWN, len(found))} of {len(found)}; --json has all"
    print_sentence(f"{shown}. What is within a few percent is worth measuring: scale", 0)
