"""`python -m torchmm` is the program `torchmm`."""

import sys

from torchmm.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
