"""``python -m shoal.models.run_child MODULE ARGUMENTS``: like ``python -m``, but ends with its parent.

The parent holds the other end of standard input open; the module itself gets an empty standard input.
"""

import os
import runpy
import sys

from shoal.models.child_process import end_with_parent


def main() -> None:
    """Run the module that the arguments name."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end_with_parent(lifeline)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
