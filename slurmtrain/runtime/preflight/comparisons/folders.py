"""Files and folders as each node sees them: the data, the space for what is written, and the shared run directory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.comparisons.majority import differing_values, fault_of, outliers, wrong_values
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding

LEAST_TMP_GB = 0.05  # of a node's own folder for temporary files: torch.compile, sockets and data workers need it
LEAST_FILES = 1000
LATE_S = 5.0  # a folder that shows new files later than this makes restarts and saves wait


def compare_data(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find files and folders of the config that are missing on some nodes, or differ between them."""
    for path in dict.fromkeys(path for each in facts.nodes for path in each.paths or {}):
        seen = {each.node: each.paths[path] for each in facts.nodes if each.paths and path in each.paths}
        missing = [node for node, found in seen.items() if found.kind == "missing"]
        there = len(seen) - len(missing)
        if not there:  # it may be no path at all, and if it is one, who reads it says so
            continue
        if missing:
            where = f", as on {'the other node' if there == 1 else f'{there} others'}"
            fault = Fault.NODE if there >= len(missing) else Fault.CONFIG
            yield Finding(
                FindingKind.DATA_MISSING, tuple(missing), f"{path} is not there", f"it is there{where}", True, fault
            )
        known = {node: found for node, found in seen.items() if node not in missing}
        folders = any(found.kind == "folder" for found in known.values())
        contents = {
            node: (found.kind, None if folders else found.size_bytes, found.digest) for node, found in known.items()
        }
        listings = {node: found.listing for node, found in known.items() if found.listing is not None}
        # Files may come to a folder while the nodes look, one after the other; its manifest stays as it is.
        for values, fatal in ((contents, True), ({} if outliers(contents) else listings, False)):
            yield from differing_values(
                FindingKind.DATA_DIFFERS,
                values,
                facts,
                fatal=fatal,
                say=lambda value, path=path: _said_of_path(path, value),  # type: ignore[misc]
            )


def _said_of_path(path: str, value: Hashable) -> str:
    if not isinstance(value, tuple):
        return f"the names and sizes in {path} have the digest {str(value)[:12]}"
    kind, size, digest = value
    of = "" if size is None else f" of {size} bytes"
    return f"{path} is a {kind}{of} {f'with the digest {digest[:12]}' if digest else 'without a manifest'}"


def compare_disks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find folders that cannot be written, or have no space left."""
    for path in dict.fromkeys(path for each in facts.nodes for path in each.disks or {}):
        shared = path in expected.shared
        least = expected.min_free_gb if shared else LEAST_TMP_GB
        found: dict[str, str] = {}
        for node in facts.nodes:
            disk = (node.disks or {}).get(path)
            if disk is None:
                continue
            if disk.error is not None:
                found[node.node] = f"{path} cannot be written: {disk.error}"
            elif disk.free_gb is not None and disk.free_gb < least:
                found[node.node] = f"{path} has {disk.free_gb:.2g} GB left"
            elif disk.free_files is not None and disk.free_files < LEAST_FILES:
                found[node.node] = f"{path} has room for {disk.free_files} more files"
        right = f"at least {least:g} GB{' (preflight.min_free_gb)' if shared else ''} and {LEAST_FILES} files"
        fatal = shared or fault_of(list(found), facts) is Fault.NODE
        for finding in wrong_values(FindingKind.DISK_FULL, found, right, facts, fatal=fatal):
            # Free space of a shared folder is the same for all nodes, so a single node tells of all.
            alone = shared and len(facts.nodes) == 1
            yield Finding(
                finding.kind, finding.nodes, finding.value, right, fatal, Fault.CONFIG if alone else finding.fault
            )


def compare_shared_folder(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes that do not see, or see late, what another one writes into the run directory."""
    known = {each.node: each.folder for each in facts.nodes if each.folder is not None}
    errors = {node: f"cannot write into the run directory: {each.error}" for node, each in known.items() if each.error}
    yield from wrong_values(FindingKind.SHARED_FOLDER, errors, "it can, as rank 0", facts, fatal=True)
    blind = {
        node: f"does not see in {each.limit_s:.0f} s what rank 0 has written into the run directory"
        for node, each in known.items()
        if each.seen_after_s is None and not each.stale and node not in errors
    }
    stale = {node: "sees what the run directory held before" for node, each in known.items() if each.stale}
    for found in (blind, stale):
        yield from wrong_values(FindingKind.SHARED_FOLDER, found, "all nodes see it", facts, fatal=True)
    late = {
        node: f"has seen {each.seen_after_s:.1f} s late what rank 0 wrote into the run directory"
        for node, each in known.items()
        if each.seen_after_s is not None and each.seen_after_s > LATE_S and node not in stale
    }
    yield from wrong_values(FindingKind.SHARED_FOLDER, late, f"within {LATE_S:g} s", facts, fatal=False)
    lost = [node for node in facts.unseen if node not in (*errors, *blind, *stale)]
    if lost:
        value = f"what it writes into the run directory is not seen on {facts.nodes[0].node}"
        yield from wrong_values(FindingKind.SHARED_FOLDER, dict.fromkeys(lost, value), "it is", facts, fatal=True)
