"""Generate texts or images with a trained model.

`torchmm generate` is the same program; `python scripts/generate.py --help` shows its arguments.
"""

import sys

from torchmm.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
