"""Show the state of a run, its losses, its slowest ranks, its generated texts and its files.

`torchmm show` is the same program; `python scripts/show_run.py --help` shows its arguments.
"""

import sys

from torchmm.commands.show_run import main

if __name__ == "__main__":
    sys.exit(main())
