"""What a process runs with: interpreter, packages, driver, CUDA and NCCL, container.

Everything is read from files of the interpreter and the kernel. No package is imported for it, torch neither, so that the
facts of a node that cannot even load torch can be told. Facts are texts by name, in groups, so that those of two runs, two
attempts or two ranks can be compared without knowing what they mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WHOLE_BYTES = 64 << 20  # files up to this size are digested whole
SAMPLES, SAMPLE_BYTES = 32, 1 << 16
_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]+@")  # up to the last @ before the path: a password may have one, too
_SECRET_IN_URL = re.compile(
    r"(?<=[?&;])([\w.%-]*(?:token|secret|passw|credential|signature|key|sig)[\w.%-]*=)[^&;#\s]+", re.IGNORECASE
)
_NAME_OR_VERSION = re.compile(r"^(Name|Version):[ \t]*(.+?)\s*$", re.MULTILINE)
_TORCH_FACTS = {"cuda": "cuda", "hip": "hip", "git_version": "torch_revision"}

Facts = Mapping[str, str]


@dataclass(frozen=True)
class ProcessFacts:
    """Facts of a process and its node; each group is text by name.

    Attributes:
        system: host, os, kernel, machine, libc, python, interpreter.
        packages: version of each installed distribution, by its name in lower case with dashes.
        gpu: driver, the CUDA or HIP that torch is built for, and the versions of NCCL and cuDNN.
        container: the image that the process is in, as far as apptainer tells.
    """

    system: Facts = field(default_factory=dict)
    packages: Facts = field(default_factory=dict)
    gpu: Facts = field(default_factory=dict)
    container: Facts = field(default_factory=dict)

    def to_json(self) -> dict[str, dict[str, str]]:
        """Return the facts as plain values; groups without any are left out."""
        return {name: dict(sorted(group.items())) for name, group in vars(self).items() if group}


def gather_facts(variables: Mapping[str, str] = os.environ, root: Path = Path("/")) -> ProcessFacts:
    """Return the facts of this process. It takes some hundredths of a second, longer where packages lie on a slow disk.

    Args:
        variables: environment variables.
        root: folder of `proc`, `sys` and `etc`.
    """
    packages = _packages()
    image = variables.get("APPTAINER_CONTAINER") or variables.get("SINGULARITY_CONTAINER")
    return ProcessFacts(
        system=_system(root),
        packages=packages,
        gpu=_gpu(root, packages, variables),
        container={"kind": "apptainer", "image": image} if image else {},
    )


def login_facts() -> dict[str, str]:
    """Return the facts of this process that need no look at its packages: interpreter, system, kernel."""
    return {name: value for name, value in _system(Path("/")).items() if name != "host"}


def without_user(text: str) -> str:
    """Return a text without the user names and passwords of URLs in it, and without the keys and tokens in their queries."""
    text = _USER_IN_URL.sub("", text)
    return _SECRET_IN_URL.sub(r"\1***", text) if "://" in text else text


def fingerprint_of(path: Path) -> str:
    """Return a digest of a file: of all bytes of one up to 64 MiB, of its size and 32 samples of a larger one.

    An image of a container has tens of gigabytes, which would take a minute to read. Samples tell two images apart, but
    prove nothing against somebody who wants to deceive.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_BYTES:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha256(str(size).encode())
        for index in range(SAMPLES):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, (size - SAMPLE_BYTES) * index // (SAMPLES - 1)))
    return f"sampled-sha256:{digest.hexdigest()}"


def _system(root: Path) -> dict[str, str]:
    kernel = os.uname()
    return {
        "host": socket.gethostname(),
        "os": _os_name(root),
        "kernel": f"{kernel.sysname} {kernel.release}",
        "machine": kernel.machine,
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "interpreter": sys.executable,
    }


def _os_name(root: Path) -> str:
    for line in _read(root / "etc" / "os-release").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip().strip('"')
    return ""


def _packages() -> dict[str, str]:
    """Return the versions of the installed distributions."""
    from importlib import metadata  # it takes some hundredths of a second to load

    versions: dict[str, str] = {}
    for each in metadata.distributions():
        with contextlib.suppress(Exception):  # a damaged installation: its other packages still count
            # `each.version` would have the parser of e-mail read the whole file, with the package's README in it.
            described = _header(each.read_text("METADATA") or each.read_text("PKG-INFO") or "")
            name = re.sub(r"[-_.]+", "-", described["Name"]).lower()  # as indexes compare it (PEP 503)
            if name not in versions:  # the first one on the path is the one that is imported
                versions[name] = described["Version"]
    return versions


def _header(metadata: str) -> dict[str, str]:
    """Return name and version of a distribution by the head of its metadata."""
    return dict(reversed(_NAME_OR_VERSION.findall(metadata.partition("\n\n")[0])))


def _gpu(root: Path, packages: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, module in (("driver", "nvidia"), ("amdgpu", "amdgpu")):
        if version := _read(root / "sys/module" / module / "version").strip():
            found[name] = version
    found |= _torch_build()
    for name, prefix in (("nccl", "nvidia-nccl-"), ("cudnn", "nvidia-cudnn-")):
        versions = {version for package, version in packages.items() if package.startswith(prefix)}
        stated = variables.get(f"{name.upper()}_VERSION")  # in the images of NVIDIA, which link it in
        if versions or stated:
            found[name] = ", ".join(sorted(versions)) or str(stated)
    return found


def _torch_build() -> dict[str, str]:
    """Return what torch was built for, by the text of its version.py: importing it takes seconds."""
    for folder in sys.path:
        path = Path(folder or ".") / "torch" / "version.py"
        text = _read(path)
        if text:
            pairs = re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            return {_TORCH_FACTS[name]: value for name, value in pairs if name in _TORCH_FACTS}
    return {}


def _read(path: Path) -> str:
    """Return the text of a small file; nothing if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
