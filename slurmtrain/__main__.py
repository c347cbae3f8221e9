"""The program of `python -m slurmtrain`, and of the command `slurmtrain`."""

import gc
import sys

from slurmtrain.system import signals


def run() -> None:
    """Run the command line of this process and exit. Ctrl-C during the imports, or after the verb, exits with 130."""
    signals.leave_silently()
    gc.set_threshold(200_000)  # a command makes many objects, and hardly a cycle
    from slurmtrain.cli import main  # takes a while, in which somebody may think better of it

    code = main()
    signals.leave_silently()
    gc.freeze()  # or Python would look for cycles among all objects before it exits, for a fifth of a short command
    sys.exit(code)


if __name__ == "__main__":
    run()
