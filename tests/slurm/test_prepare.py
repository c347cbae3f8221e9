"""job=prepare on a real SLURM: tasks share the work, and a preemption does not show in what comes out."""

from __future__ import annotations

from tests.slurm.project import Project
from tests.support.raw_text import content, hanging_disk, write_all_formats


def test_two_tasks_that_are_preempted_make_what_one_process_makes(project: Project) -> None:
    write_all_formats(project.path / "raw")
    fields = ["prepare.inputs=[raw]", "prepare.unit_mb=0.0005", "prepare.valid_fraction=0.2"]
    project.cluster.slurmtrain("prepare", *fields, "prepare.output=alone", cwd=project.path)
    expected = content(project.path / "alone")

    output = project.path / "by-tasks"
    disk = hanging_disk(project.path / "disk", output, after=2)
    job = ["job=prepare", *fields, "prepare.output=by-tasks", "cluster.nodes=1", "cluster.tasks_per_node=2"]
    run = project.submit(*job, f"+cluster.env.PYTHONPATH={disk['PYTHONPATH']}", small=False)
    records = output / ".prepare/units"
    run.wait_until(lambda: records.is_dir() and any(records.glob("*.json")), "at work")
    run.preempt_by_high()
    done = {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    (project.path / "disk/gate").unlink()
    run.finish()
    first, last = run.attempts()
    assert first.reason == "preempted" and last.first_step == first.last_step == len(done)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert content(output) == expected
    units = len(list(records.glob("*.json")))
    assert f"{units}/{units}" in run.status()
