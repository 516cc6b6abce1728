"""Sample order and packing in pure Python, as references for the array implementations."""

from __future__ import annotations


def turns(weights: list[float], sizes: list[int | None], count: int) -> list[int]:
    """Return the feed of each of `count` samples under stride scheduling with feeds of `sizes`."""
    counts = [0] * len(weights)
    feeds = []
    for _ in range(count):
        alive = [
            f for f, w in enumerate(weights) if w and (sizes[f] is None or counts[f] < sizes[f])
        ]
        if not alive:
            break
        feed = min(alive, key=lambda f: (counts[f] + 1) / weights[f])
        counts[feed] += 1
        feeds.append(feed)
    return feeds


class PlainPacker:
    """Best-fit packer of (tokens, tiles) with a bounded number of open packs of sample names."""

    def __init__(self, length: int, max_open: int, max_tiles: int | None = None) -> None:
        self.length, self.max_open, self.max_tiles = length, max_open, max_tiles
        self.open: list[dict] = []
        self.closed: list[list] = []

    def add(self, name: object, tokens: int, tiles: int = 0, now: int = 0) -> None:
        fitting = [p for p in self.open if p["free"] >= tokens and self._tiles_fit(p, tiles)]
        if fitting:
            pack = min(fitting, key=lambda p: p["free"])
        else:
            if len(self.open) == self.max_open:
                self._close(min(self.open, key=lambda p: p["free"]))
            pack = {"free": self.length, "tiles": 0, "names": [], "opened": now}
            self.open.append(pack)
        pack["names"].append(name)
        pack["free"] -= tokens
        pack["tiles"] += tiles
        if not pack["free"]:
            self._close(pack)

    def close_older(self, time: int) -> None:
        for pack in [p for p in self.open if p["opened"] <= time]:
            self._close(pack)

    def flush(self) -> None:
        for pack in list(self.open):
            self._close(pack)

    def _tiles_fit(self, pack: dict, tiles: int) -> bool:
        if not (tiles and pack["tiles"]):
            return True
        return self.max_tiles is None or pack["tiles"] + tiles <= self.max_tiles

    def _close(self, pack: dict) -> None:
        self.open = [p for p in self.open if p is not pack]
        self.closed.append(pack["names"])
