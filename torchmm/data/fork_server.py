"""Preload module of the fork server of data workers.

It makes the server and all forked workers ignore signals, and imports the data code before workers
are forked.
"""

import gc

from torchmm.common.processes import ignore_signals

ignore_signals()

gc.disable()  # Imports create many objects and little garbage.
import torchmm.data.nodes  # noqa: E402, F401

gc.freeze()  # Garbage collection in workers would copy shared pages of these objects.
gc.enable()
