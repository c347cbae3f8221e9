"""Pods as real containers, by `podman kube play`, where it is there and may start some.

The image is empty: it has folders alone, on which the spec of the pod mounts those of this machine. Kubelet's part is played
here: the variable of an Indexed Job, SIGTERM, the grace time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.support.jobset_simulator import JobSetSimulator

IMAGE = "localhost/slurmtrain-test:1"
# Podman 4 refuses a container where it may not raise limits, and crun where both versions of cgroups are mounted.
SETTINGS = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
"""
HOLD = "umount /sys/fs/cgroup/unified 2>/dev/null; exec sleep infinity"


def python_folders() -> list[Path]:
    """The folders that this Python is made of: its links, its libraries, and what it imports."""
    found, link = {Path("/usr"), Path(sys.base_prefix), Path(__file__).parents[2]}, Path(sys.executable)
    while link.is_symlink():
        found.add(link.parent)
        link = link.parent / os.readlink(link)
    found |= {Path(each) for each in (sys.prefix, *sys.path) if each and Path(each).is_dir()}
    return [each for each in found if not any(other in each.parents for other in found)]


class Podman:
    """Podman with a storage of its own, in a mount namespace of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))  # it takes no path of more than 50 letters
        limit = int(subprocess.run(["bash", "-c", "ulimit -Hn"], capture_output=True, text=True, check=True).stdout)
        (self._folder / "containers.conf").write_text(SETTINGS.format(files=limit))
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", HOLD])
        self._played: set[str] = set()

    def why_not(self) -> str | None:
        """Why no container can be started here, in podman's words; None: it can."""
        try:
            self.make_image()
            self("run", "--rm", "--network=host", "--volume=/usr:/usr", IMAGE, "/usr/bin/true")
        except AssertionError as error:
            return str(error)
        return None

    def __call__(self, *words: str, check: bool = True) -> str:
        own = ["--storage-driver=vfs", f"--root={self._folder}/root", f"--runroot={self._folder}/run", "--runtime=crun"]
        done = subprocess.run(
            ["nsenter", f"--target={self._holder.pid}", "--mount", "podman", *own, *words],
            env={**os.environ, "CONTAINERS_CONF": str(self._folder / "containers.conf")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(done.stderr)
        return done.stdout

    def make_image(self) -> None:
        """Make the image: folders, and the links of a Debian."""
        root = self._folder / "image"
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                (root / name).symlink_to(os.readlink(f"/{name}"))
        with tarfile.open(self._folder / "image.tar", "w") as tar:
            tar.add(root, "/")
        self("import", str(self._folder / "image.tar"), IMAGE)

    def play(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(pod))
        self("pod", "rm", "--force", name, check=False)
        self._played.add(name)
        self("kube", "play", "--network=host", str(file))

    def close(self) -> None:
        for name in self._played:
            self("pod", "rm", "--force", "--time=0", name, check=False)
        self._holder.kill()
        self._holder.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class PodmanPod:
    """One pod of podman's, with one container."""

    def __init__(self, podman: Podman, name: str, container: str):
        self._podman, self._name, self._container = podman, name, f"{name}-{container}"
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found = json.loads(self._podman("inspect", "--format={{json .State}}", self._container))
            self.returncode = found["ExitCode"] if found["Status"] == "exited" else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up = time.monotonic() + (timeout or 60)
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired(self._name, timeout or 60)
            time.sleep(0.2)
        return code

    def send_signal(self, sig: int) -> None:
        self._podman("kill", f"--signal={int(sig)}", self._container, check=False)

    def kill(self) -> None:
        self.send_signal(9)

    def logs(self) -> str:
        return self._podman("logs", self._container)


class PodmanJobSet(JobSetSimulator):
    """The rules of a JobSet over real containers."""

    def __init__(self, manifest: dict[str, Any], folder: Path, podman: Podman):
        super().__init__(manifest, folder)
        self.podman = podman

    def start_pod(self, index: int, template: dict[str, Any]) -> PodmanPod:
        spec = json.loads(json.dumps(template["spec"]))
        (container,) = spec["containers"]
        # Podman 4 does not know the names of nodes, which kubelet fills in.
        container["env"] = [each for each in container["env"] if "value" in each]
        container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        name = f"pod-{index}"
        metadata = {"name": name, "labels": template["metadata"]["labels"]}
        self.podman.play({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return PodmanPod(self.podman, name, container["name"])

    def logs(self) -> str:
        return "\n".join(pod.logs()[-3000:] for pod in self.pods if isinstance(pod, PodmanPod))
