"""What the login node can say of a path: there, missing, or a matter of the nodes."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.config.sight import Seen, Sight, look, sight_of_gap


def test_a_gap_in_a_shared_folder_is_certain_and_one_above_it_is_not() -> None:
    # Where this machine has no /scratch, what many machines have of their own, and what is installed on the nodes.
    unknown = ("/", "/tmp", "/dev/shm", "/mnt", "/opt/cuda")
    for place in (*unknown, "/scratch", "/mnt/lustre", "/home/me"):
        expected = Sight.UNKNOWN if place in unknown else Sight.MISSING
        assert sight_of_gap(Path(place), empty=False) == expected, place
    assert sight_of_gap(Path("/scratch"), empty=True) == Sight.UNKNOWN  # not mounted here
    assert sight_of_gap(Path("/scratch/me"), empty=True) == Sight.MISSING


def test_a_path_is_looked_at_as_deep_as_this_machine_sees(tmp_path: Path) -> None:
    (tmp_path / "data" / "texts").mkdir(parents=True)
    (tmp_path / "data" / "texts" / "a.txt").touch()
    data = tmp_path / "data"
    assert look(data / "texts").sight == Sight.THERE
    assert look(data / "te*" / "*.txt").sight == look(data / "**" / "*.txt").sight == Sight.THERE
    assert look(data / "*.json") == Seen(Sight.MISSING, data, "*.json")
    assert look(data / "nothing" / "**" / "*.txt") == Seen(Sight.MISSING, data, "nothing")
    assert look(data / "x" / "y") == Seen(Sight.MISSING, data, "x")
    assert look(data / "texts" / "a.txt" / "y") == Seen(Sight.MISSING, data / "texts" / "a.txt", "y")
    assert look(data / "x" / "y", [f"{data}/x/"]).sight == look(data / "x", [str(data / "x")]).sight == Sight.OF_NODES
    assert look(data / "xy", [str(data / "x")]).sight == Sight.MISSING
    (data / "[1].txt").touch()
    assert look(data / "[1].txt").sight == Sight.THERE
