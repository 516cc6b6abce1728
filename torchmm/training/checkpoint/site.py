"""Which ranks see the same directory: all of them where it is shared, else those of one node.

Found by looking, not from names of machines: every rank leaves a mark, and the first rank whose
mark another one sees does for both what one rank has to do for a directory (claim it, name and
remove checkpoints in it). Nobody lists the directory or looks for a mark before it can be there,
so that network file systems have nothing old to answer from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import ConfigError
from torchmm.parallel.health.peers import SideGroup


class Site:
    """This rank's place among those that see the same directory.

    Args:
        members: their ranks, the first of which acts for all.
    """

    def __init__(self, group: SideGroup, members: list[int]) -> None:
        self._group = group
        self.rank = members.index(group.rank)
        self.size = len(members)
        self.is_leader = self.rank == 0

    @classmethod
    def of_all(cls, group: SideGroup) -> Site:
        """Of a directory that all ranks share, as the run directory."""
        return cls(group, list(range(group.size)))

    @classmethod
    def find(cls, group: SideGroup, directory: Path) -> Site:
        """By marks in the directory, which is made where there is none; collective.

        Raises:
            ConfigError: a rank cannot write into it.
        """
        name = group.on_rank_0(lambda: uuid4().hex)
        marks = [directory / f".rank-{rank:05}.{name}" for rank in range(group.rank + 1)]
        problem = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            marks[-1].touch()
        except OSError as error:
            problem = f"cannot write {error.filename}: {error.strerror}"
        for rank, found in enumerate(group.gather(problem)):
            if found is not None:
                raise ConfigError(f"checkpoint.staging: rank {rank} {found}")
        leader = next(rank for rank, mark in enumerate(marks) if mark.exists())
        leaders = group.gather(leader)  # after which nobody looks any more
        marks[-1].unlink()
        return cls(group, [rank for rank, its in enumerate(leaders) if its == leader])

    def on_leaders(self, function: Callable[[], object]) -> None:
        """Calls it on the first rank of every site; what it raises, all ranks raise. Collective,
        and over on all ranks when it returns on one."""
        failure = None
        if self.is_leader:
            try:
                function()
            except Exception as error:  # raised below, on all ranks
                failure = error
        for found in self._group.gather(failure):
            if found is not None:
                raise found
