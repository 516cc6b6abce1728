"""Start a Ray cluster like a run, print a line, and wait."""

import os
import time

from torchmm.extensions.remote.producers.engine import LOOPBACK_ONLY

os.environ.update(LOOPBACK_ONLY)

import ray

from torchmm.extensions.remote.producers.ray_actors import _connect


@ray.remote
class Actor:
    """A process of the cluster."""

    def process(self) -> int:
        """Return the process id."""
        return os.getpid()


if __name__ == "__main__":
    assert _connect(starts_cluster=True)
    actor = Actor.options(num_cpus=0).remote()
    ray.get(actor.process.remote())
    os.write(1, b"started\n")
    time.sleep(1e6)
