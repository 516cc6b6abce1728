"""Run train.py in a process of a `TrainServer` instead of this process, started by torchrun.

usage: train_client.py SOCKET ARGUMENTS...

The client passes on its environment and output, forwards SIGTERM and exits with the code of
train.py.
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
