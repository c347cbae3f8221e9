"""A real, throwaway SLURM on one machine: own daemons, own ports, own directory, no root, nothing in /etc.

Users can try a requeue in it before the real cluster requeues their job; the test suite uses it as its fixture.

    sandbox = up(SandboxSpec(nodes=4, gpus=4), default_directory("default"))
    subprocess.run(["srun", "-N2", "hostname"], env={**os.environ, **sandbox.env()})
    sandbox.down()
"""

from slurmtrain.sandbox.control import Sandbox, find, up
from slurmtrain.sandbox.directory import default_directory
from slurmtrain.sandbox.spec import SandboxSpec

__all__ = ["Sandbox", "SandboxSpec", "default_directory", "find", "up"]
