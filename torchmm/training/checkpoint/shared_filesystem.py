"""Find the ranks that share a directory: all ranks, or the ranks of one node.

Host names are not sufficient. Every rank creates a marker file. The first rank whose marker is
visible to a rank is the leader of both. The leader performs the tasks of a single rank: it claims
the directory, and renames and removes checkpoints. No rank lists the directory or looks for a
marker before the marker can exist. Otherwise the cache of a network file system could return an
outdated result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import ConfigError
from torchmm.parallel.health.peers import SideGroup


class DirectoryGroup:
    """The ranks that share a directory with this rank.

    Args:
        group: All ranks of the run.
        members: Ranks that share the directory. The first one is the leader.
    """

    def __init__(self, group: SideGroup, members: list[int]) -> None:
        self._group = group
        self.rank = members.index(group.rank)
        self.size = len(members)
        self.is_leader = self.rank == 0

    @classmethod
    def of_all_ranks(cls, group: SideGroup) -> DirectoryGroup:
        """Return the site of a directory that all ranks share, such as the run directory."""
        return cls(group, list(range(group.size)))

    @classmethod
    def find(cls, group: SideGroup, directory: Path) -> DirectoryGroup:
        """Create the directory if necessary, and find its ranks by marker files. Collective.

        Raises:
            ConfigError: A rank cannot write to it.
        """
        name = group.run_on_rank_zero(lambda: uuid4().hex)
        markers = [directory / f".rank-{rank:05}.{name}" for rank in range(group.rank + 1)]
        problem = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            markers[-1].touch()
        except OSError as error:
            problem = f"cannot write {error.filename}: {error.strerror}"
        for rank, error_text in enumerate(group.gather(problem)):
            if error_text is not None:
                raise ConfigError(f"checkpoint.staging_dir: rank {rank} {error_text}")
        leader = next(rank for rank, marker in enumerate(markers) if marker.exists())
        leaders = group.gather(leader)  # no rank looks for markers after this line
        markers[-1].unlink()
        return cls(
            group, [rank for rank, rank_leader in enumerate(leaders) if rank_leader == leader]
        )

    def run_on_local_leaders(self, function: Callable[[], object]) -> None:
        """Call a function on the leader of every site. All ranks raise its exception.

        Collective. All calls are finished when it returns on any rank.
        """
        failure = None
        if self.is_leader:
            try:
                function()
            except Exception as error:  # raised below, on all ranks
                failure = error
        for rank_failure in self._group.gather(failure):
            if rank_failure is not None:
                raise rank_failure
