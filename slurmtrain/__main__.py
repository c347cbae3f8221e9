"""The program of `python -m slurmtrain`, and of the command `slurmtrain`."""

import sys

from slurmtrain.system import signals


def run() -> None:
    """Run the command line of this process and exit. Ctrl-C during the imports, or after the verb, exits with 130."""
    signals.leave_silently()
    from slurmtrain.cli import main  # takes a while, in which somebody may think better of it

    code = main()
    signals.leave_silently()
    sys.exit(code)


if __name__ == "__main__":
    run()
