"""Forward to `runtime.jobs.hydra_task`: jobs of Hydra programs that earlier versions have submitted call it by this name."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmtrain.runtime.jobs.hydra_task import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
