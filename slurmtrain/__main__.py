"""The program of `python -m slurmtrain`."""

import sys

from slurmtrain.cli import main

sys.exit(main())
