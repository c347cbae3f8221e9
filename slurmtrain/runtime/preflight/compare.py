"""Compare the facts of all ranks with each other and with what the config asks for: a pure function to findings.

What is compared is in `comparisons`, by subject. A fact that is None is not known, and is no finding.
"""

from __future__ import annotations

from slurmtrain.runtime.preflight.comparisons.folders import compare_data, compare_disks, compare_shared_folder
from slurmtrain.runtime.preflight.comparisons.gpus import compare_gpus
from slurmtrain.runtime.preflight.comparisons.machine import compare_clocks, compare_cpus, compare_memory
from slurmtrain.runtime.preflight.comparisons.network import compare_network
from slurmtrain.runtime.preflight.comparisons.ranks import compare_ranks
from slurmtrain.runtime.preflight.comparisons.software import (
    compare_code_and_config,
    compare_packages,
    compare_versions,
)
from slurmtrain.runtime.preflight.comparisons.variables import compare_variables
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Finding, sorted_by_weight, without

COMPARISONS = (
    compare_ranks,
    compare_gpus,
    compare_versions,
    compare_packages,
    compare_code_and_config,
    compare_data,
    compare_clocks,
    compare_disks,
    compare_memory,
    compare_cpus,
    compare_variables,
    compare_network,
    compare_shared_folder,
)


def compare(facts: GatheredFacts, expected: Expected) -> list[Finding]:
    """Return what is not as it should be, the fatal first."""
    found = [finding for comparison in COMPARISONS for finding in comparison(facts, expected)]
    return sorted_by_weight(without(found, expected.ignored))
