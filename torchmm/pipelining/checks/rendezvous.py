"""Whether the ranks of a plan can all reach its end.

Computation never blocks, so only posts and waits are played. A transfer is complete when both its
ends are posted and not before, as with large messages on every backend: a plan that passes does
not depend on buffers. The k-th send of a channel meets its k-th receive whatever they are called;
that both mean the same is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

Event = tuple[int, int, int]
"""A post or a wait of one rank:

- the counter that a post adds one to, or that a wait waits for;
- the count from which on a wait does not block; 0 for a post;
- the position of the action in the rank's program.
"""


def find_stuck(events: Sequence[Sequence[Event]], counters: int) -> dict[int, Event]:
    """Plays the events of all ranks until none can go on.

    Args:
        events: by rank, in order.
        counters: how many there are.

    Returns:
        By rank that did not reach its end: the wait it is stuck in.
    """
    reached = [0] * counters
    waiting: dict[int, list[int]] = {}
    following = [0] * len(events)
    ready = list(range(len(events)))
    while ready:
        rank = ready.pop()
        program, index = events[rank], following[rank]
        while index < len(program):
            counter, needed, _ = program[index]
            if not needed:
                reached[counter] += 1
                if counter in waiting:
                    ready += waiting.pop(counter)
            elif reached[counter] < needed:
                waiting.setdefault(counter, []).append(rank)
                break
            index += 1
        following[rank] = index
    return {
        rank: program[following[rank]]
        for rank, program in enumerate(events)
        if following[rank] < len(program)
    }
