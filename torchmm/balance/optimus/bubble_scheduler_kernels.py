"""Compiled loops of the bubble scheduler over flat arrays.

`bubble_scheduler` describes the algorithm. These loops place encoder kernels in free intervals of
devices and are called once per evaluated assignment. All times are picoseconds from the start of
the LLM timeline. Times before its start are negative.

Invariants of every loop:

- The free intervals of a device are sorted and do not touch. The first has no start and the last
  has no end, so every kernel fits into the last one. `NEVER_PS` covers lists without it.
- A cursor never moves back. One pass over all tasks reads each interval at most once per device.
- A kernel is never split over two intervals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.numba_utils import Int32s, Int64s, cached_njit, internal_njit, norefcount_njit

NEVER_PS = 1 << 61
Flags = NDArray[np.bool_]

# [Note: first fit with cursors]
#
# A *task* is one pass of a group of images through an encoder pipeline. A *row* is a task on one
# stage of this pipeline. The *kernels* of a row run sequentially. Both levels are flat
# arrays:
#
#     task t   rows    first[t] .. first[t + 1]         one per stage
#     row r    kernels pointers[r] .. pointers[r + 1]   padded with kernels of 0 ps
#
# A device has two lists of free intervals: one for computation and one for links. A kernel uses the
# first interval at or after the cursor of the device that is long enough:
#
#     free      |-----|   |---|   |-------------
#     kernels   |aaa|             |bbbbb||c|        b is too long for the second interval;
#                                                   c fits into it, but runs after b
#
# If an encoder is split over several devices, each kernel runs on all of them at the same time. It
# starts as soon as all of them have a long enough interval.
#
# A device runs rows in task order, so a skipped interval is never used later. The cursor (a time
# and an index in each list) only moves forward, and placement of all tasks is one scan of the
# intervals. By induction over the task order, no kernel can end earlier: each kernel starts as
# early as its predecessors allow.
#
# Three passes use the same loops:
#
#     pass               upstream  mirrored  result
#     forward            no        no        earliest forward passes
#     forward, mirrored  yes       yes       latest forward passes that the LLM allows. Time is
#                                            negated, so intervals, tasks and kernels are visited in
#                                            reverse, and the computed ends are negated starts.
#     backward           yes       no        earliest backward passes in the free intervals that
#                                            forward passes leave (`remaining_intervals`)


class EncoderTasks(NamedTuple):
    """Tasks of all encoders in one direction. Forward and backward tasks have the same rows."""

    encoder: Int32s
    """Encoder of each task."""
    first: Int32s
    """Offsets of the rows of each task, shape (tasks + 1,). Task t has rows `first[t]` to `first[t
    + 1]`, one per stage."""
    pointers: Int32s
    """Offsets of the kernels of each row, shape (rows + 1,)."""
    duration_ps: Int64s
    """Duration of each kernel. 0 marks a padded entry without a kernel."""
    is_communication: Flags
    """Whether each kernel communicates."""
    transfer_ps: Int64s
    """Transfer time of each row: to the rank of the next stage, or from the last stage to the first
    rank of the LLM. Gradients have the same transfer time."""
    order: Int32s
    """Task indices in the order in which they run."""


class EncoderPipelines(NamedTuple):
    """Encoder pipelines on the devices of an LLM pipeline."""

    first: Int32s
    """Offsets of the pipelines of each encoder, shape (encoders + 1,)."""
    device: Int32s
    """First device of each stage, shape (pipelines, stages)."""
    width: Int32s
    """Number of consecutive devices per stage of each pipeline. They run each kernel together."""
    rank: Int32s
    """LLM pipeline rank of each device."""
    entry_rank: int
    """Rank of the first LLM stage."""


class FreeIntervals(NamedTuple):
    """Free intervals of all devices for computation and for links, each in the format of
    `IdleIntervals`."""

    compute_pointers: Int64s
    compute_start: Int64s
    compute_end: Int64s
    link_pointers: Int64s
    link_start: Int64s
    link_end: Int64s


class SchedulingPass(NamedTuple):
    """Direction in which loops process all tasks, with the inputs of the loops."""

    tasks: EncoderTasks
    pipelines: EncoderPipelines
    free_intervals: FreeIntervals
    upstream: bool
    """Whether tasks run from the last stage to the first."""
    reversed_time: bool
    """Whether time is negated: the last tasks and the last kernels come first."""


class Cursor(NamedTuple):
    """Current time and current interval indices of each device."""

    time_ps: Int64s
    compute: Int64s
    link: Int64s


def initial_cursor(free_intervals: FreeIntervals, begin_ps: Int64s) -> Cursor:
    """Return the initial cursor of all devices.

    Args:
        free_intervals: Free intervals of the devices.
        begin_ps: Earliest start time of each device.
    """
    return Cursor(
        begin_ps.copy(),
        free_intervals.compute_pointers[:-1].copy(),
        free_intervals.link_pointers[:-1].copy(),
    )


@internal_njit
def _place_row(
    row: int,
    device: int,
    ready_ps: int,
    direction: SchedulingPass,
    cursor: Cursor,
    start_ps: Int64s,
) -> int:
    """Place the kernels of a row on one device.

    Returns:
        The end time of the row, or NEVER_PS if a kernel fits into no interval.
    """
    tasks = direction.tasks
    free_intervals = direction.free_intervals
    now = max(ready_ps, cursor.time_ps[device])
    first = tasks.pointers[row]
    last = tasks.pointers[row + 1]
    compute = cursor.compute[device]
    link = cursor.link[device]
    last_compute = free_intervals.compute_pointers[device + 1]
    last_link = free_intervals.link_pointers[device + 1]
    empty = True
    for index in range(last - first):
        kernel = last - 1 - index if direction.reversed_time else first + index
        duration = tasks.duration_ps[kernel]
        if duration > 0:
            empty = False
            if tasks.is_communication[kernel]:
                while link < last_link and (
                    free_intervals.link_end[link] - max(now, free_intervals.link_start[link])
                    < duration
                ):
                    link += 1
                if link == last_link:
                    return NEVER_PS
                now = max(now, free_intervals.link_start[link])
            else:
                while compute < last_compute and (
                    free_intervals.compute_end[compute]
                    - max(now, free_intervals.compute_start[compute])
                    < duration
                ):
                    compute += 1
                if compute == last_compute:
                    return NEVER_PS
                now = max(now, free_intervals.compute_start[compute])
        start_ps[kernel] = now
        now += duration
    if empty:
        return ready_ps
    cursor.time_ps[device] = now
    cursor.compute[device] = compute
    cursor.link[device] = link
    return now


@internal_njit
def _earliest_fit(
    now: int,
    duration: int,
    cursor: Int64s,
    pointers: Int64s,
    ends: tuple[Int64s, Int64s],
    first: int,
    width: int,
) -> int:
    """Return the earliest time at which a kernel fits on adjacent devices.

    The loop checks the devices round-robin. If the interval of a device starts later than
    `now`, all devices must be checked again with the later time.

    Args:
        now: Lower bound of the start time.
        duration: Duration of the kernel.
        cursor: Current interval of each device; updated.
        pointers: Offsets of the intervals of each device.
        ends: Start and end times of all intervals.
        first: First device.
        width: Number of devices.

    Returns:
        The start time, or NEVER_PS if there is none.
    """
    agreed = 0
    device = first
    while agreed < width:
        interval = cursor[device]
        last = pointers[device + 1]
        while interval < last and ends[1][interval] - max(now, ends[0][interval]) < duration:
            interval += 1
        cursor[device] = interval
        if interval == last:
            return NEVER_PS
        if ends[0][interval] > now:
            now = ends[0][interval]
            agreed = 0
        agreed += 1
        device = first + (device - first + 1) % width
    return now


@internal_njit
def _place_wide_row(
    row: int,
    device: int,
    width: int,
    ready_ps: int,
    direction: SchedulingPass,
    cursor: Cursor,
    start_ps: Int64s,
) -> int:
    """Place the kernels of a row on several devices at once.

    `_place_row` is the faster special case for one device.
    """
    tasks = direction.tasks
    free_intervals = direction.free_intervals
    now = ready_ps
    for group_device in range(device, device + width):
        now = max(now, cursor.time_ps[group_device])
    first = tasks.pointers[row]
    last = tasks.pointers[row + 1]
    compute = free_intervals.compute_start, free_intervals.compute_end
    link = free_intervals.link_start, free_intervals.link_end
    empty = True
    for index in range(last - first):
        kernel = last - 1 - index if direction.reversed_time else first + index
        duration = tasks.duration_ps[kernel]
        if duration > 0:
            empty = False
            if tasks.is_communication[kernel]:
                now = _earliest_fit(
                    now, duration, cursor.link, free_intervals.link_pointers, link, device, width
                )
            else:
                now = _earliest_fit(
                    now,
                    duration,
                    cursor.compute,
                    free_intervals.compute_pointers,
                    compute,
                    device,
                    width,
                )
            if now == NEVER_PS:
                return NEVER_PS
        start_ps[kernel] = now
        now += duration
    if empty:
        return ready_ps
    for group_device in range(device, device + width):
        cursor.time_ps[group_device] = now
    return now


@internal_njit
def _place_task(
    task: int,
    pipeline: int,
    release_ps: int,
    direction: SchedulingPass,
    cursor: Cursor,
    start_ps: Int64s,
) -> int:
    """Place all rows of a task, in stage order or in reverse.

    Returns:
        The time at which the result of the task is available, or NEVER_PS.
    """
    tasks = direction.tasks
    pipelines = direction.pipelines
    upstream = direction.upstream
    first = tasks.first[task]
    last = tasks.first[task + 1]
    now = release_ps
    previous_rank = pipelines.entry_rank
    for index in range(last - first):
        stage = last - first - 1 - index if upstream else index
        device = pipelines.device[pipeline, stage]
        rank = pipelines.rank[device]
        if rank != previous_rank and (upstream or index > 0):
            now += tasks.transfer_ps[first + stage - (0 if upstream else 1)]
        if pipelines.width[pipeline] == 1:
            now = _place_row(first + stage, device, now, direction, cursor, start_ps)
        else:
            width = pipelines.width[pipeline]
            now = _place_wide_row(first + stage, device, width, now, direction, cursor, start_ps)
        if now == NEVER_PS:
            return NEVER_PS
        previous_rank = rank
    if not upstream and previous_rank != pipelines.entry_rank:
        now += tasks.transfer_ps[last - 1]
    return now


@internal_njit
def _copy_cursor(
    pipelines: EncoderPipelines, pipeline: int, stages: int, source: Cursor, destination: Cursor
) -> None:
    """Copy the cursor of all devices of a pipeline."""
    for stage in range(stages):
        first = pipelines.device[pipeline, stage]
        for device in range(first, first + pipelines.width[pipeline]):
            destination.time_ps[device] = source.time_ps[device]
            destination.compute[device] = source.compute[device]
            destination.link[device] = source.link[device]


@norefcount_njit
def place_tasks(
    direction: SchedulingPass,
    pipeline_of: Int32s,
    release_ps: Int64s,
    cursor: Cursor,
    start_ps: Int64s,
    end_ps: Int64s,
) -> None:
    """Place all tasks of an assignment.

    Args:
        direction: Tasks, pipelines, free intervals and direction.
        pipeline_of: Pipeline of each task.
        release_ps: Earliest start time of each task.
        cursor: Initial cursor; updated to the final cursor.
        start_ps: Output, start time of each kernel.
        end_ps: Output, time at which the result of each task is available, or NEVER_PS.
    """
    order = direction.tasks.order
    for index in range(len(order)):
        task = order[len(order) - 1 - index if direction.reversed_time else index]
        end_ps[task] = _place_task(
            task, pipeline_of[task], release_ps[task], direction, cursor, start_ps
        )


@norefcount_njit
def assign_tasks(
    direction: SchedulingPass,
    release_ps: Int64s,
    deadline_ps: Int64s,
    cursor: Cursor,
    saved: Cursor,
    start_ps: Int64s,
    pipeline_of: Int32s,
) -> bool:
    """Assign each next task to the pipeline of its encoder that finishes it first.

    Args:
        direction: Tasks, pipelines, free intervals and direction.
        release_ps: Earliest start time of each task.
        deadline_ps: Latest end time of each task.
        cursor: Initial cursor; updated.
        saved: Scratch buffer with the shape of `cursor`.
        start_ps: Scratch buffer, one entry per kernel.
        pipeline_of: Output, pipeline of each task.

    Returns:
        Whether all deadlines are met. If not, entries after the first late task are unchanged.
    """
    tasks = direction.tasks
    pipelines = direction.pipelines
    for task in tasks.order:
        count = tasks.first[task + 1] - tasks.first[task]
        encoder = tasks.encoder[task]
        best, best_end = -1, NEVER_PS
        # Place the task on each pipeline and undo the placement. The last iteration places it on
        # the best pipeline and does not undo it.
        for pipeline in range(pipelines.first[encoder], pipelines.first[encoder + 1] + 1):
            commit = pipeline == pipelines.first[encoder + 1]
            tried = best if commit else pipeline
            if tried < 0:
                return False
            _copy_cursor(pipelines, tried, count, cursor, saved)
            end = _place_task(task, tried, release_ps[task], direction, cursor, start_ps)
            if commit:
                break
            if end < best_end:
                best, best_end = pipeline, end
            _copy_cursor(pipelines, tried, count, saved, cursor)
        pipeline_of[task] = best
        if best_end > deadline_ps[task]:
            return False
    return True


@cached_njit
def _busy_intervals(
    tasks: EncoderTasks, pipeline_of: Int32s, pipelines: EncoderPipelines, start_ps: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Return pointers, start times and end times of placed kernels, sorted by device and time."""
    devices = len(pipelines.rank)
    pointers = np.zeros(devices + 1, np.int64)
    for task in tasks.order:
        for row in range(tasks.first[task], tasks.first[task + 1]):
            first = pipelines.device[pipeline_of[task], row - tasks.first[task]]
            for device in range(first, first + pipelines.width[pipeline_of[task]]):
                pointers[device + 1] += tasks.pointers[row + 1] - tasks.pointers[row]
    pointers = np.cumsum(pointers)
    next_index = pointers[:-1].copy()
    starts = np.empty(pointers[-1], np.int64)
    ends = np.empty(pointers[-1], np.int64)
    for task in tasks.order:
        for row in range(tasks.first[task], tasks.first[task + 1]):
            first = pipelines.device[pipeline_of[task], row - tasks.first[task]]
            for device in range(first, first + pipelines.width[pipeline_of[task]]):
                for kernel in range(tasks.pointers[row], tasks.pointers[row + 1]):
                    duration = tasks.duration_ps[kernel]
                    if duration > 0:
                        starts[next_index[device]] = start_ps[kernel]
                        ends[next_index[device]] = start_ps[kernel] + duration
                        next_index[device] += 1
    for device in range(devices):  # unused entries of padded kernels
        starts[next_index[device] : pointers[device + 1]] = NEVER_PS
        ends[next_index[device] : pointers[device + 1]] = NEVER_PS
    return pointers, starts, ends


@cached_njit
def _subtract(
    pointers: Int64s,
    start: Int64s,
    end: Int64s,
    busy_pointers: Int64s,
    busy_start: Int64s,
    busy_end: Int64s,
) -> tuple[Int64s, Int64s, Int64s]:
    """Return free intervals minus busy intervals. Both are sorted by device and time."""
    devices = len(pointers) - 1
    max_intervals = len(start) + len(busy_start)
    new_pointers = np.zeros(devices + 1, np.int64)
    new_start = np.empty(max_intervals, np.int64)
    new_end = np.empty(max_intervals, np.int64)
    count = 0
    for device in range(devices):
        busy = busy_pointers[device]
        last = busy_pointers[device + 1]
        for index in range(pointers[device], pointers[device + 1]):
            now = start[index]
            while busy < last and busy_end[busy] <= now:
                busy += 1
            while busy < last and busy_start[busy] < end[index]:
                if busy_start[busy] > now:
                    new_start[count] = now
                    new_end[count] = busy_start[busy]
                    count += 1
                now = max(now, busy_end[busy])
                if busy_end[busy] > end[index]:
                    break
                busy += 1
            if now < end[index]:
                new_start[count] = now
                new_end[count] = end[index]
                count += 1
        new_pointers[device + 1] = count
    return new_pointers, new_start[:count], new_end[:count]


@cached_njit
def remaining_intervals(
    direction: SchedulingPass, pipeline_of: Int32s, start_ps: Int64s
) -> FreeIntervals:
    """Return the free intervals that remain after placement.

    Each kernel occupies both computation and links of its devices.
    """
    free_intervals = direction.free_intervals
    pointers, start, end = _busy_intervals(
        direction.tasks, pipeline_of, direction.pipelines, start_ps
    )
    compute = _subtract(
        free_intervals.compute_pointers,
        free_intervals.compute_start,
        free_intervals.compute_end,
        pointers,
        start,
        end,
    )
    links = _subtract(
        free_intervals.link_pointers,
        free_intervals.link_start,
        free_intervals.link_end,
        pointers,
        start,
        end,
    )
    return FreeIntervals(compute[0], compute[1], compute[2], links[0], links[1], links[2])
