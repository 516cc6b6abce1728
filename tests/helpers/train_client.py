"""Run train.py in a process of a `TrainServer` instead of this process, started by torchrun.

usage: train_client.py SOCKET ARGUMENTS...

The client passes on its environment and output, forwards SIGTERM and exits with the code of
train.py.
"""

import os
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path

connection = Client(sys.argv[1], "AF_UNIX")
log = str(Path("/proc/self/fd/1").readlink())
connection.send({"log": log, "env": dict(os.environ), "arguments": sys.argv[2:]})
process = connection.recv()
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(process, number))
code = connection.recv()
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
