"""A kubectl on PATH that keeps objects in a folder, for what is asked of it and in which words. It is no Kubernetes.

`install(folder)` puts it there. It knows `create`, `get` and `delete` of the files and selectors that we pass, refuses a name
that exists as kubectl does, and fails with the words in the file `fails`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


class FakeKubectl:
    """Its folder, as tests see it."""

    def __init__(self, directory: Path):
        self.directory = directory

    @classmethod
    def install(cls, directory: Path) -> FakeKubectl:
        directory.mkdir()
        command = directory / "kubectl"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {directory} "$@"\n')
        command.chmod(0o755)
        return cls(directory)

    @property
    def calls(self) -> list[list[str]]:
        log = self.directory / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def objects(self) -> dict[str, dict[str, Any]]:
        """What exists, as KIND/NAME."""
        return {path.stem.replace("+", "/"): json.loads(path.read_text()) for path in self.directory.glob("*+*.json")}

    def change(self, name: str, **fields: Any) -> None:
        """Set fields of an object, as its controller does."""
        path = self.directory / f"{name.replace('/', '+')}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def create(self, manifest: Path) -> None:
        """Create the objects of a manifest, as a person does."""
        subprocess.run([self.directory / "kubectl", "create", "-f", manifest], check=True)

    def remove(self, name: str) -> None:
        """Remove an object, as its controller does."""
        (self.directory / f"{name.replace('/', '+')}.json").unlink()

    def fail(self, words: str) -> None:
        (self.directory / "fails").write_text(words)


def main(directory: Path, *words: str) -> int:
    with (directory / "calls").open("a") as log:
        log.write(json.dumps(words) + "\n")
    if (directory / "fails").exists():
        print((directory / "fails").read_text(), file=sys.stderr)
        return 1
    if words[:2] == ("delete", "pods"):
        return 0
    assert words[1] == "-f"
    given = list(yaml.safe_load_all(Path(words[2]).read_text()))
    paths = {directory / f"{each['kind']}+{each['metadata']['name']}.json": each for each in given}
    if words[0] == "create":
        for path, each in paths.items():
            if path.exists():
                kind, name = each["kind"].lower(), each["metadata"]["name"]
                print(
                    f'Error from server (AlreadyExists): error when creating "{words[2]}": {kind}s "{name}" already exists',
                    file=sys.stderr,
                )
        new = [path for path in paths if not path.exists()]
        for path in new:
            path.write_text(json.dumps(paths[path]))
        return 0 if len(new) == len(paths) else 1
    there = [path for path in paths if path.exists()]
    if words[0] == "delete":
        for path in there:
            path.unlink()
        return 0
    found = [json.loads(path.read_text()) for path in there]
    if found:
        print(json.dumps(found[0] if len(given) == 1 else {"kind": "List", "items": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
