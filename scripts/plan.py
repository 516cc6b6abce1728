"""Search for the fastest parallelism degrees on a cluster.

`torchmm plan` is the same program; `python scripts/plan.py --help` shows its arguments.
"""

import sys

from torchmm.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
