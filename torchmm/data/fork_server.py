"""Imported by the fork server of the data workers, and by nothing else.

Makes the server, and every worker born from it, ignore signals from the start, and imports the
data code for the workers to inherit.
"""

import gc

from torchmm.common.processes import ignore_signals

ignore_signals()

gc.disable()  # imports create a million objects and no garbage
import torchmm.data.nodes  # noqa: E402, F401

gc.freeze()  # no worker looks for garbage there, which would also copy the pages they share
gc.enable()
