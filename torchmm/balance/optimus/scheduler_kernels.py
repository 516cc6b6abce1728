"""Compiled loops of bubble filling over flat arrays; `scheduler` says what they do and why.

Times are picoseconds from the begin of the LLM's timeline; before it they are negative.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.compiled import Int32s, Int64s, compiled, inner, loop

NEVER_PS = 1 << 61
Flags = NDArray[np.bool_]

# [Note: first fit with cursors]
#
# A *task* is one pass of some images through an encoder's pipeline; a *row* is a task on one of its
# stages; its *kernels* run there one after the other. Both levels are flat arrays:
#
#     task t   rows    first[t] .. first[t + 1]         one for each stage
#     row r    kernels pointers[r] .. pointers[r + 1]   of 0 ps where a stage has fewer
#
# Free time of device d are sorted intervals that do not touch, one list for computation and one for
# links; the first begins before all time, the last never ends. Kernels are never split: each goes
# to the first interval, from where the device stands, that has room for it:
#
#     free      |-----|   |---|   |-------------
#     kernels   |aaa|             |bbbbb||c|        b is too long for the second interval;
#                                                   c would fit, but comes after b
#
# An encoder that is split over several devices runs each kernel on all of them at once: as early as
# all of them have room.
#
# A device runs rows in the order of the tasks, so an interval that was passed over is never needed
# again: where the device stands (`Cursor`: a time and an interval of each list) only moves on, and
# placing everything is one walk through the intervals. By induction over that order, nothing can
# end earlier anywhere: each kernel starts as early as what precedes it allows.
#
# Three passes use the same loops:
#
#     pass               upstream  mirrored  what for
#     forward            no        no        forwards as early as possible
#     forward, mirrored  yes       yes       forwards as late as the LLM allows: time is negated, so
#                                            intervals, tasks and kernels come in reverse order, and
#                                            ends are the negated starts
#     backward           yes       no        backwards as early as possible, in the free time that
#                                            forwards have left (`residual`)


class Tasks(NamedTuple):
    """One direction of all encoders' tasks; forward and backward have the same rows."""

    encoder: Int32s
    """By task: whose it is."""
    first: Int32s
    """By task, and one more: its rows are `first[t]` to `first[t + 1]`, by stage."""
    pointers: Int32s
    """By row, and one more: its kernels."""
    duration_ps: Int64s
    """By kernel; 0: there is none."""
    on_links: Flags
    """By kernel: whether it communicates."""
    hop_ps: Int64s
    """By row: from its rank to that of the next stage, or of the LLM's first, or back."""
    order: Int32s
    """The tasks as they go through the pipelines."""


class Pipelines(NamedTuple):
    """Encoder pipelines on an LLM pipeline's devices."""

    first: Int32s
    """By encoder, and one more: its pipelines."""
    device: Int32s
    """By pipeline and stage: the first."""
    width: Int32s
    """By pipeline: devices that follow each other and run its kernels together."""
    rank: Int32s
    """By device: its rank of the LLM's pipeline."""
    entry_rank: int
    """Where the LLM's first stage is."""


class Room(NamedTuple):
    """Free time of all devices; as `FreeTime`, twice."""

    compute_pointers: Int64s
    compute_start: Int64s
    compute_end: Int64s
    link_pointers: Int64s
    link_start: Int64s
    link_end: Int64s


class Pass(NamedTuple):
    """One way of going through all tasks."""

    tasks: Tasks
    pipelines: Pipelines
    room: Room
    upstream: bool
    """From the last stage to the first."""
    mirrored: bool
    """Time runs backwards: last tasks and last kernels first."""


class Cursor(NamedTuple):
    """By device: where it stands."""

    time_ps: Int64s
    compute: Int64s
    link: Int64s


def start_cursor(room: Room, begin_ps: Int64s) -> Cursor:
    """Every device before all its intervals, and not before a given time."""
    return Cursor(
        begin_ps.copy(), room.compute_pointers[:-1].copy(), room.link_pointers[:-1].copy()
    )


@inner
def _place_row(
    row: int, device: int, ready_ps: int, way: Pass, cursor: Cursor, start_ps: Int64s
) -> int:
    """Places a row's kernels; its end, or NEVER_PS if there is no room."""
    tasks = way.tasks
    room = way.room
    now = max(ready_ps, cursor.time_ps[device])
    first = tasks.pointers[row]
    last = tasks.pointers[row + 1]
    compute = cursor.compute[device]
    link = cursor.link[device]
    last_compute = room.compute_pointers[device + 1]
    last_link = room.link_pointers[device + 1]
    empty = True
    for index in range(last - first):
        kernel = last - 1 - index if way.mirrored else first + index
        duration = tasks.duration_ps[kernel]
        if duration > 0:
            empty = False
            if tasks.on_links[kernel]:
                while link < last_link and (
                    room.link_end[link] - max(now, room.link_start[link]) < duration
                ):
                    link += 1
                if link == last_link:
                    return NEVER_PS
                now = max(now, room.link_start[link])
            else:
                while compute < last_compute and (
                    room.compute_end[compute] - max(now, room.compute_start[compute]) < duration
                ):
                    compute += 1
                if compute == last_compute:
                    return NEVER_PS
                now = max(now, room.compute_start[compute])
        start_ps[kernel] = now
        now += duration
    if empty:
        return ready_ps
    cursor.time_ps[device] = now
    cursor.compute[device] = compute
    cursor.link[device] = link
    return now


@inner
def _fits(
    now: int,
    duration: int,
    cursor: Int64s,
    pointers: Int64s,
    ends: tuple[Int64s, Int64s],
    first: int,
    width: int,
) -> int:
    """The first time from which on all of some devices have room; NEVER_PS if there is none.

    Args:
        cursor: by device: an interval; moved on.
        ends: where intervals begin and end.
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


@inner
def _place_wide_row(
    row: int, device: int, width: int, ready_ps: int, way: Pass, cursor: Cursor, start_ps: Int64s
) -> int:
    """The same on several devices at once; slower for one."""
    tasks = way.tasks
    room = way.room
    now = ready_ps
    for own in range(device, device + width):
        now = max(now, cursor.time_ps[own])
    first = tasks.pointers[row]
    last = tasks.pointers[row + 1]
    compute = room.compute_start, room.compute_end
    link = room.link_start, room.link_end
    empty = True
    for index in range(last - first):
        kernel = last - 1 - index if way.mirrored else first + index
        duration = tasks.duration_ps[kernel]
        if duration > 0:
            empty = False
            if tasks.on_links[kernel]:
                now = _fits(now, duration, cursor.link, room.link_pointers, link, device, width)
            else:
                now = _fits(
                    now, duration, cursor.compute, room.compute_pointers, compute, device, width
                )
            if now == NEVER_PS:
                return NEVER_PS
        start_ps[kernel] = now
        now += duration
    if empty:
        return ready_ps
    for own in range(device, device + width):
        cursor.time_ps[own] = now
    return now


@inner
def _place_task(
    task: int, pipeline: int, release_ps: int, way: Pass, cursor: Cursor, start_ps: Int64s
) -> int:
    """Places a task's rows in the order of stages, or against it; when its result is there."""
    tasks = way.tasks
    pipelines = way.pipelines
    upstream = way.upstream
    first = tasks.first[task]
    last = tasks.first[task + 1]
    now = release_ps
    before = pipelines.entry_rank
    for index in range(last - first):
        stage = last - first - 1 - index if upstream else index
        device = pipelines.device[pipeline, stage]
        rank = pipelines.rank[device]
        if rank != before and (upstream or index > 0):
            now += tasks.hop_ps[first + stage - (0 if upstream else 1)]
        if pipelines.width[pipeline] == 1:
            now = _place_row(first + stage, device, now, way, cursor, start_ps)
        else:
            width = pipelines.width[pipeline]
            now = _place_wide_row(first + stage, device, width, now, way, cursor, start_ps)
        if now == NEVER_PS:
            return NEVER_PS
        before = rank
    if not upstream and before != pipelines.entry_rank:
        now += tasks.hop_ps[last - 1]
    return now


@inner
def _copy_cursor(
    pipelines: Pipelines, pipeline: int, stages: int, source: Cursor, destination: Cursor
) -> None:
    """Of the devices of a pipeline."""
    for stage in range(stages):
        first = pipelines.device[pipeline, stage]
        for device in range(first, first + pipelines.width[pipeline]):
            destination.time_ps[device] = source.time_ps[device]
            destination.compute[device] = source.compute[device]
            destination.link[device] = source.link[device]


@loop
def place(
    way: Pass,
    pipeline_of: Int32s,
    release_ps: Int64s,
    cursor: Cursor,
    start_ps: Int64s,
    end_ps: Int64s,
) -> None:
    """Places all tasks.

    Args:
        pipeline_of: by task.
        release_ps: by task: it may not start before.
        cursor: where devices begin; where they have ended.
        start_ps: by kernel; written.
        end_ps: by task: when its result is there, or NEVER_PS; written.
    """
    order = way.tasks.order
    for index in range(len(order)):
        task = order[len(order) - 1 - index if way.mirrored else index]
        end_ps[task] = _place_task(task, pipeline_of[task], release_ps[task], way, cursor, start_ps)


@loop
def assign_tasks(
    way: Pass,
    release_ps: Int64s,
    deadline_ps: Int64s,
    cursor: Cursor,
    saved: Cursor,
    start_ps: Int64s,
    pipeline_of: Int32s,
) -> bool:
    """Hands each next task to the pipeline of its encoder that finishes it first.

    Args:
        release_ps, deadline_ps: by task: it may not start before, or end after.
        cursor: where devices begin; moved on.
        saved: as large; for trials.
        start_ps: by kernel; written.
        pipeline_of: written.

    Returns:
        Whether all deadlines are met; if not, tasks after the first late one keep theirs.
    """
    tasks = way.tasks
    pipelines = way.pipelines
    for task in tasks.order:
        count = tasks.first[task + 1] - tasks.first[task]
        encoder = tasks.encoder[task]
        best, best_end = -1, NEVER_PS
        # Each pipeline is tried and taken back; one more turn repeats the best of them to stay.
        for pipeline in range(pipelines.first[encoder], pipelines.first[encoder + 1] + 1):
            commit = pipeline == pipelines.first[encoder + 1]
            tried = best if commit else pipeline
            if tried < 0:
                return False
            _copy_cursor(pipelines, tried, count, cursor, saved)
            end = _place_task(task, tried, release_ps[task], way, cursor, start_ps)
            if commit:
                break
            if end < best_end:
                best, best_end = pipeline, end
            _copy_cursor(pipelines, tried, count, saved, cursor)
        pipeline_of[task] = best
        if best_end > deadline_ps[task]:
            return False
    return True


@compiled
def _busy(
    tasks: Tasks, pipeline_of: Int32s, pipelines: Pipelines, start_ps: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Kernels by device, in order of time: pointers, starts, ends."""
    devices = len(pipelines.rank)
    pointers = np.zeros(devices + 1, np.int64)
    for task in tasks.order:
        for row in range(tasks.first[task], tasks.first[task + 1]):
            first = pipelines.device[pipeline_of[task], row - tasks.first[task]]
            for device in range(first, first + pipelines.width[pipeline_of[task]]):
                pointers[device + 1] += tasks.pointers[row + 1] - tasks.pointers[row]
    pointers = np.cumsum(pointers)
    at = pointers[:-1].copy()
    starts = np.empty(pointers[-1], np.int64)
    ends = np.empty(pointers[-1], np.int64)
    for task in tasks.order:
        for row in range(tasks.first[task], tasks.first[task + 1]):
            first = pipelines.device[pipeline_of[task], row - tasks.first[task]]
            for device in range(first, first + pipelines.width[pipeline_of[task]]):
                for kernel in range(tasks.pointers[row], tasks.pointers[row + 1]):
                    duration = tasks.duration_ps[kernel]
                    if duration > 0:
                        starts[at[device]] = start_ps[kernel]
                        ends[at[device]] = start_ps[kernel] + duration
                        at[device] += 1
    for device in range(devices):  # where kernels of no duration were
        starts[at[device] : pointers[device + 1]] = NEVER_PS
        ends[at[device] : pointers[device + 1]] = NEVER_PS
    return pointers, starts, ends


@compiled
def _subtract(
    pointers: Int64s,
    start: Int64s,
    end: Int64s,
    busy_pointers: Int64s,
    busy_start: Int64s,
    busy_end: Int64s,
) -> tuple[Int64s, Int64s, Int64s]:
    """Free time without what is busy; both by device and in order of time."""
    devices = len(pointers) - 1
    most = len(start) + len(busy_start)
    new_pointers = np.zeros(devices + 1, np.int64)
    new_start = np.empty(most, np.int64)
    new_end = np.empty(most, np.int64)
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


@compiled
def residual(way: Pass, pipeline_of: Int32s, start_ps: Int64s) -> Room:
    """Free time without placed kernels, which occupy computation and links alike."""
    room = way.room
    pointers, start, end = _busy(way.tasks, pipeline_of, way.pipelines, start_ps)
    compute = _subtract(
        room.compute_pointers, room.compute_start, room.compute_end, pointers, start, end
    )
    links = _subtract(room.link_pointers, room.link_start, room.link_end, pointers, start, end)
    return Room(compute[0], compute[1], compute[2], links[0], links[1], links[2])
