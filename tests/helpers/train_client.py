"""Lets a `TrainServer` run train.py instead of this process; for torchrun to start.

usage: train_client.py SOCKET ARGUMENTS...

Passes its environment and output on, forwards SIGTERM and ends as train.py ended.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    stream = connection.makefile("rw")
log = str(Path("/proc/self/fd/1").readlink())
stream.write(json.dumps({"log": log, "env": dict(os.environ), "arguments": sys.argv[2:]}) + "\n")
stream.flush()
process = int(stream.readline())
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(process, number))
code = int(stream.readline())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
