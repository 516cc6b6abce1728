"""Show the files of a run, its losses, its slowest ranks and the texts that it generated.

`torchmm show` is the same program; `python scripts/show_run.py --help` shows its arguments.
"""

import sys

from torchmm.commands.show_run import main

if __name__ == "__main__":
    sys.exit(main())
