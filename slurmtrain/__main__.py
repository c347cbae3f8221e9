"""`python -m slurmtrain`, and the command `slurmtrain`."""

import sys

from slurmtrain import interrupts


def run() -> None:
    """Run the command line of this process, and end it. Ctrl-C shows no traceback from here on, and ends it with code 130."""
    interrupts.leave_silently()
    from slurmtrain.cli import main  # takes a while, in which somebody may think better of it

    code = main()
    interrupts.leave_silently()
    sys.exit(code)


if __name__ == "__main__":
    run()
