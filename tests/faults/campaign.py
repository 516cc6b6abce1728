"""The faults that this project is held against: what is done, what happens, which tests show it.

`FAULTS` is the table. `number` is that of the list of faults the project began with (F1 to F33), of
a finding of the review of reliability (R, S), or a letter of ours: U for copies of checkpoints, P
for processes beside those that train, M for modules apart, Q for schedulers, E for exports.
`before` is what that review saw, at commit 4776752, where it tried the same. A row is shown by
tests, each of whose cases is one injection, or `each` of them. `write_page.py` makes
docs/reference/reliability.md of the table and of what ran.

Rejected: results written by hand, which say what somebody once saw; tests written from the table,
which would be one test for faults that have nothing in common.
"""

from __future__ import annotations

from typing import NamedTuple

NOT_TRIED = "not tried"
PASS = "pass"


class Fault(NamedTuple):
    """A row of the table."""

    number: str
    what: str
    """What is injected."""
    code: str
    """Exit codes, or those of the errors that are raised where no whole train.py runs; of the
    injection, then of a start after it. "-": nothing ends."""
    status: str
    """What STATUS.json says; "-": the tests run no whole train.py, or it is not about that."""
    happens: str
    """What happens and what a message names."""
    equal: str
    """What must be the same afterwards."""
    before: str
    shown_by: tuple[str, ...]
    """Test functions, as FILE::NAME below tests/."""
    each: int = 1
    """Injections in one case of a test."""


class Refused(NamedTuple):
    """What is not mended, and why."""

    number: str
    what: str
    why: str


TRAIN = "faults/test_train_faults.py::"
SMALL = "faults/test_faults.py::"
DIRECTORY = "faults/test_run_directory.py::"
DAMAGE = "unit/training/test_checkpoint_damage.py::"
SAVED = "unit/training/test_checkpoint.py::"
COPIES = "unit/training/test_checkpoint_upload.py::"
UPLOADS = "faults/test_uploads.py::"
STARTS = "faults/test_bad_starts.py::"
HOSTILE = "unit/data/test_hostile_records.py::"
HUNG = "faults/test_hung_data.py::"
LOADER = "unit/data/test_loader.py::"
METRICS = "unit/training/test_metrics.py::"
READER = "unit/data/test_shared_reader.py::"
REGISTRY = "unit/data/test_registry.py::"
PLANNED = "unit/data/test_planned_by_producers.py::"
PLANNING = "unit/planning/test_planning_process.py::"
EXPORT = "unit/training/test_export.py::"
PREEMPT = "unit/training/test_preempt.py::"
RAY = "faults/test_ray_runs.py::"
SLURM = "faults/test_slurm.py::"
UNITS = "faults/test_unit_faults.py::"

FAULTS = [
    # Processes
    Fault(
        "F1",
        "SIGKILL or SIGSEGV of a rank in a step",
        "6, killed -9 or -11",
        "failed",
        "others end within seconds and name rank, process and step",
        "resumed: every bit of an undisturbed run",
        "pass; culprit named in 4 of 5",
        (
            f"{SMALL}test_a_killed_rank_is_named_and_the_run_resumes_exactly",
            f"{TRAIN}test_a_lost_peer_is_named",
        ),
    ),
    Fault(
        "F2",
        "five kills under torchrun --max-restarts",
        "0",
        "done",
        "resumed each time",
        "losses, metrics without a gap, last checkpoint bit by bit",
        PASS,
        (f"{TRAIN}test_torchrun_recovers_from_five_kills_with_the_same_bits",),
        each=5,
    ),
    Fault(
        "F2",
        "one kill under torchrun, all at its defaults",
        "0",
        "done",
        "resumed",
        "parameters bit by bit",
        PASS,
        (f"{SMALL}test_torchrun_restarts_a_killed_rank_and_ends_with_the_same_bits",),
    ),
    Fault(
        "F2",
        "a node is lost, its launcher too, under --nnodes 1:2",
        "0",
        "done",
        "the node that is left goes on alone",
        "losses to 1e-5, no step missing or doubled",
        NOT_TRIED,
        (f"{TRAIN}test_what_is_left_goes_on_when_a_node_is_lost",),
    ),
    Fault(
        "F3",
        "SIGTERM to torchrun, with data workers",
        "75",
        "preempted",
        "all ranks save the same step",
        "the rerun ends bit by bit",
        PASS,
        (f"{TRAIN}test_sigterm_to_torchrun_saves_and_the_rerun_ends_with_the_same_bits",),
    ),
    Fault(
        "F4",
        "SIGTERM to one rank",
        "75",
        "preempted",
        "all ranks save the same step",
        "the rerun ends bit by bit",
        PASS,
        (f"{TRAIN}test_sigterm_to_one_rank_stops_all_at_the_same_step",),
    ),
    Fault(
        "F5",
        "SIGTERM and SIGINT to data workers",
        "-",
        "-",
        "workers ignore them",
        "samples go on",
        PASS,
        (f"{LOADER}test_workers_outlive_the_signals_of_launchers",),
    ),
    Fault(
        "F6",
        "a second signal, most likely during the save; each signal alone",
        "75",
        "preempted",
        "the first counts; one whole checkpoint",
        "the rerun ends bit by bit",
        PASS,
        (
            f"{SMALL}test_sigterm_to_one_rank_saves_the_same_step_on_all",
            f"{PREEMPT}test_a_signal_only_sets_a_flag",
            f"{PREEMPT}test_the_first_signal_counts",
        ),
    ),
    Fault(
        "F7",
        "a rank sleeps for ever, or is stopped",
        "6",
        "failed",
        "others time out and name it, its step and phase",
        "-",
        PASS,
        (f"{SMALL}test_a_rank_that_stands_still_is_named_in_time",),
    ),
    Fault(
        "F7, R1",
        "data workers are stopped; a file that never answers",
        "3, peers 6",
        "failed",
        "after data.timeout_s worker and samples are named; peers name the rank that waits",
        "-",
        "FAIL: hung for ever, also after SIGTERM",
        (
            f"{HUNG}test_the_run_ends_and_names_workers_and_samples",
            f"{HUNG}test_peers_name_the_rank_that_waits_for_data",
            "unit/data/test_waiting.py::test_a_stopped_worker_is_named_with_its_samples_and_ended",
            "unit/data/test_waiting.py::test_a_file_that_never_answers_ends_the_wait",
        ),
    ),
    Fault(
        "R1",
        "SIGTERM while a rank waits for data that do not come",
        "75",
        "preempted",
        "all ranks save the last whole step",
        "no step missing or doubled after the rerun",
        "FAIL: SIGTERM was ignored",
        (f"{HUNG}test_a_stop_signal_ends_a_wait_for_data_and_saves",),
    ),
    Fault(
        "F8",
        "a rank whose device, memory or link is slow",
        "0",
        "done",
        "named before the first step; slowest_rank in every record",
        "-",
        "pass in part",
        (
            "distributed/test_preflight.py::test_two_ranks_compare_themselves",
            "distributed/test_preflight.py::test_the_slow_rank_is_named_with_its_machine",
            f"{METRICS}test_rates_add_up_over_ranks_and_times_are_those_of_the_slowest",
        ),
    ),
    Fault(
        "F9",
        "an exception on one rank",
        "1, peers 6",
        "failed, of that rank",
        "its message is the status",
        "-",
        PASS,
        (f"{SMALL}test_an_exception_on_one_rank_ends_all_and_is_the_reported_cause",),
    ),
    Fault(
        "R9",
        "clocks of machines that are fast or slow",
        "6",
        "failed",
        "the silent rank is named",
        "-",
        "FAIL: not named, 2 of 3",
        ("unit/parallel/test_health.py::test_a_silent_rank_is_named_whatever_its_clock_says",),
    ),
    Fault(
        "R11",
        "a rank that never comes; one that dies while groups are made",
        "6",
        "failed",
        "the others end after parallel.timeout_s",
        "-",
        "FAIL: 100 s and more at a limit of 20",
        (
            f"{TRAIN}test_a_peer_that_never_comes_is_waited_for_only_so_long",
            f"{STARTS}test_a_rank_that_dies_while_groups_are_made_is_not_waited_for",
        ),
    ),
    Fault(
        "R11",
        "a mute program has MASTER_PORT",
        "6",
        "failed",
        "all end after parallel.timeout_s",
        "-",
        "FAIL: more than 100 s at a limit of 6",
        (f"{STARTS}test_a_mute_program_on_the_port_is_not_waited_for",),
    ),
    Fault(
        "R11",
        "RANK, WORLD_SIZE and the like that are no numbers, contradict each other, are missing",
        "2",
        "none is written",
        "the variable is named",
        "-",
        "FAIL: tracebacks",
        (
            f"{STARTS}test_bad_environments_are_refused_by_variable",
            f"{STARTS}test_train_ends_with_2_and_no_traceback",
        ),
    ),
    Fault(
        "F1",
        "the process of data workers is killed, idle, or ends while they are stopped",
        "-9",
        "-",
        "no worker is left behind",
        "-",
        "pass; a fork server outlived it by seconds",
        (
            "faults/test_data_workers.py::test_workers_end_when_their_process_is_killed",
            "faults/test_data_workers.py::test_a_process_with_idle_workers_exits_at_once",
            "faults/test_data_workers.py::test_a_process_with_stopped_workers_exits_too",
        ),
    ),
    # Checkpoints
    Fault(
        "F10",
        "SIGKILL of one or both ranks at 30 random moments of a save",
        "-9",
        "-",
        "a torn save never loads; the one before it does",
        "every bit of parameters and moments",
        PASS,
        ("faults/test_kill_while_saving.py::test_thirty_kills_leave_only_whole_checkpoints",),
        each=30,
    ),
    Fault(
        "F10",
        "SIGKILL while a save is seen on the disk, through train.py",
        "-9, peer 6",
        "failed, then done",
        "only that save is lost; its remains are removed",
        "the rerun ends bit by bit",
        PASS,
        (f"{TRAIN}test_kill_while_saving_in_the_background_loses_only_that_save",),
    ),
    Fault(
        "F11",
        "a step is saved again",
        "-",
        "-",
        "the checkpoint of that step stays as it is",
        "its bytes",
        PASS,
        (f"{SAVED}test_a_step_is_not_saved_twice",),
    ),
    Fault(
        "F12, R4",
        "disk full at each of four files of a save, sync and async; a really full disk",
        "4",
        "-",
        "error with file, bytes needed and free; the next save works",
        "older checkpoints",
        "FAIL: code 1, traceback, STATUS running",
        (
            f"{DAMAGE}test_a_full_disk_is_named_and_harms_nothing",
            f"{DAMAGE}test_a_really_full_disk",
            f"{DAMAGE}test_other_write_errors_keep_their_name",
        ),
    ),
    Fault(
        "F12, R4",
        "train.py on disks too small for a checkpoint or the export, or that fill up",
        "4",
        "failed",
        "message names file and reason; once there is room a new start goes on",
        "checkpoints",
        "FAIL, 4 of 4: code 1, traceback, STATUS running",
        (
            f"{DIRECTORY}test_a_disk_too_small_for_a_checkpoint",
            f"{DIRECTORY}test_a_disk_that_fills_up_while_training",
            f"{DIRECTORY}test_a_disk_too_small_for_the_export",
        ),
    ),
    Fault(
        "R4",
        "output_dir is read-only, or cannot be; data.index_cache cannot be",
        "2",
        "failed where it can be written",
        "before ranks meet; key, file and reason are named",
        "-",
        "FAIL: traceback, 1",
        (
            f"{DIRECTORY}test_a_read_only_output_directory",
            f"{DIRECTORY}test_a_directory_that_cannot_be",
        ),
    ),
    Fault(
        "R4, R7",
        "STATUS.json on a full disk, or that cannot be replaced, or two writers",
        "that of the run",
        "what is so",
        "says how the run ended, or is gone; never half, never what is not so any more",
        "-",
        "FAIL: said running",
        (
            f"{PREEMPT}test_a_status_gets_onto_a_full_disk",
            f"{PREEMPT}test_a_status_that_cannot_be_replaced_does_not_stay",
            f"{PREEMPT}test_readers_never_see_half_a_status",
            f"{PREEMPT}test_the_culprit_is_told_from_its_victims_in_any_order",
            "unit/training/test_ending.py::test_a_status_that_cannot_be_written_hides_nothing",
            "unit/training/test_ending.py::test_closing_hides_no_error_that_came_first",
        ),
    ),
    Fault(
        "R7",
        "STATUS.json of an earlier run is empty, torn, nested, of a newer version",
        "that of the run",
        "replaced",
        "counts as none; the start goes on",
        "-",
        "FAIL: every start stopped, code 1",
        (
            f"{PREEMPT}test_an_unreadable_status_of_before_is_none",
            f"{PREEMPT}test_a_status_of_a_newer_version_is_read_without_what_is_new",
        ),
    ),
    Fault(
        "F13",
        "50 injuries drawn at random: bits, pages, truncation, growth, missing, swapped files",
        "-",
        "-",
        "each is found, and the previous step taken",
        "the bytes of the previous step",
        "pass, 50 of 50",
        (f"{DAMAGE}test_fifty_injuries_are_all_found_and_the_previous_step_is_used",),
        each=50,
    ),
    Fault(
        "F13",
        "shards of another step, renamed steps, a damaged one named by hand, all damaged",
        "4",
        "failed",
        "refused by file; never a fresh start",
        "files stay",
        PASS,
        (
            f"{DAMAGE}test_shards_of_another_step_are_refused",
            f"{DAMAGE}test_a_renamed_step_is_refused",
            f"{DAMAGE}test_only_damaged_checkpoints_are_an_error_not_a_fresh_start",
            f"{TRAIN}test_a_damaged_checkpoint_is_refused_by_name",
        ),
    ),
    Fault(
        "F13, R3",
        "a checkpoint of a newer format",
        "4",
        "failed",
        "nothing is renamed, removed or counted",
        "all files",
        "FAIL: counted as damaged, training lost",
        (
            f"{DAMAGE}test_a_checkpoint_of_a_newer_version_stops_the_start",
            f"{DAMAGE}test_what_the_user_names_goes_on_beside_a_newer_version",
            f"{DAMAGE}test_retention_leaves_checkpoints_of_newer_versions_alone",
        ),
    ),
    Fault(
        "F13, R3, R8",
        "manifests without a fact; files nested 100,000 deep that the manifest vouches for",
        "-",
        "-",
        "damaged: the previous step is taken",
        "-",
        "FAIL: KeyError, RecursionError, code 1",
        (
            f"{DAMAGE}test_a_manifest_without_a_fact_is_damaged",
            f"{DAMAGE}test_deeply_nested_files_are_damaged",
        ),
    ),
    Fault(
        "F14",
        "torn and damaged ones newer than a good one; remains of dead runs",
        "-",
        "-",
        "the good one stays whatever keep says; remains are removed",
        "every bit of the good one",
        PASS,
        (
            f"{SAVED}test_torn_and_damaged_directories_never_push_out_the_good_one",
            f"{SAVED}test_temporary_directories_of_dead_runs_are_removed",
        ),
    ),
    Fault(
        "F15",
        "a stop and a resume in the same layout",
        "-",
        "-",
        "goes on",
        "losses, parameters, moments, random streams, samples: bit by bit",
        PASS,
        (f"{LOADER}test_resume_is_exact_whatever_the_workers",),
    ),
    Fault(
        "F16, R10",
        "two epochs, resumed in between; packs that nothing fits into",
        "-",
        "-",
        "no sample lost, none doubled, none later than data.max_delay_steps",
        "all samples",
        "pass; R10: up to 11 epochs late",
        (
            f"{LOADER}test_nothing_is_lost_or_doubled_over_two_epochs",
            "unit/data/test_packing.py::test_every_item_is_in_exactly_one_pack_and_none_overflows",
            "unit/data/test_packing.py::test_a_pack_that_nothing_fits_into_is_closed_by_age_only",
        ),
    ),
    Fault(
        "F17",
        "one process, FSDP2, HSDP, TP and products of them on 1, 2, 4 ranks: each into each",
        "-",
        "-",
        "loads",
        "every bit of parameters and moments",
        PASS,
        ("distributed/test_checkpoint_layouts.py::test_any_layout_loads_into_any_other",),
    ),
    Fault(
        "F18",
        "resumed on another number of ranks",
        "-",
        "-",
        "the same samples in the same order",
        "all samples",
        PASS,
        (f"{LOADER}test_resume_on_another_number_of_ranks",),
    ),
    Fault(
        "F19",
        "names, shapes, dtypes, frozen parameters that differ",
        "4",
        "failed",
        "all differences listed before anything is loaded",
        "the model's values",
        PASS,
        (
            f"{SAVED}test_missing_and_extra_names_are_refused_and_listed",
            f"{SAVED}test_other_shapes_and_dtypes_are_refused_before_anything_is_loaded",
            f"{SAVED}test_another_choice_of_frozen_parameters_is_refused",
            f"{TRAIN}test_a_finished_run_says_so_and_a_changed_model_is_refused",
        ),
    ),
    Fault(
        "F20",
        "values change while they are saved",
        "-",
        "-",
        "the values of the call are saved",
        "every bit",
        PASS,
        (f"{SAVED}test_asynchronous_save_keeps_the_values_of_the_call",),
    ),
    Fault(
        "R2",
        "other samples, order, weights, filters, settings since the checkpoint",
        "4",
        "failed",
        "what changed is named; with resume_changed_data it goes on and says how",
        "what changes no sample is free",
        "FAIL, 5 of 5: trained on silently",
        (
            "unit/data/test_changed_data.py::test_changed_data_are_refused_by_name_unless_accepted",
            "unit/data/test_changed_data.py::test_chats_that_count_otherwise_are_refused_by_name",
            "unit/data/test_changed_data.py::test_the_files_of_a_stream_are_compared",
            f"{TRAIN}test_changed_data_are_refused_or_gone_on_with_as_the_recipe_says",
        ),
    ),
    Fault(
        "R6",
        "a second run in the directory of one that is alive, also with a wrong recipe",
        "4, wrong recipe 2",
        "that of the live run",
        "told once, naming process and host",
        "every file of the live run",
        "FAIL: its STATUS.json and recipe.toml were overwritten",
        (
            f"{DIRECTORY}test_a_run_in_the_directory_of_another_touches_nothing",
            f"{SAVED}test_a_second_process_is_kept_out",
        ),
    ),
    Fault(
        "R11",
        "a file that is called like a checkpoint",
        "made later 4",
        "-",
        "set aside at the start; made later, told",
        "its content",
        "FAIL: that step was never saved",
        (f"{SAVED}test_a_file_in_the_place_of_a_checkpoint_is_set_aside_or_told",),
        each=2,
    ),
    # Copies
    Fault(
        "U1",
        "SIGKILL at 10 random moments of training with copies, on changing machines",
        "-9, then 0",
        "-",
        "goes on from its disk, or from the store alone; nothing torn counts anywhere",
        "every start, every copy and the end: bit by bit; no start finds less than an earlier one",
        NOT_TRIED,
        ("faults/test_kill_while_training.py::test_ten_kills_lose_nothing_and_tear_nothing",),
        each=10,
    ),
    Fault(
        "U2",
        "a machine is lost with its disks (both ranks killed, the directory not used again)",
        "-9, then 0",
        "done",
        "another one goes on from the newest copy",
        "losses and the last checkpoint bit by bit",
        NOT_TRIED,
        (f"{UPLOADS}test_a_lost_machine_costs_only_the_steps_since_the_last_copy",),
    ),
    Fault(
        "U3",
        "SIGKILL while copying; manifests and files of a copy that never came",
        "-9, then 0",
        "done",
        "does not count; made again by the next start, or removed",
        "weights on another machine",
        NOT_TRIED,
        (
            f"{UPLOADS}test_killed_while_copying_then_resumed_and_copied_again",
            f"{COPIES}test_a_copy_without_a_manifest_does_not_count_and_is_made_again",
            f"{COPIES}test_what_an_unfinished_copy_left_goes_with_the_next",
            f"{COPIES}test_a_copy_that_lost_a_file_is_not_committed",
        ),
    ),
    Fault(
        "U4",
        "copies injured at random; all of them; one byte through an object store",
        "0, none left 4",
        "done or failed",
        "found by hash, on all ranks alike; the one before it is taken",
        "every bit of the older one",
        NOT_TRIED,
        (
            f"{COPIES}test_damaged_copies_are_found_and_an_older_one_is_taken",
            f"{COPIES}test_all_damaged_stops_the_start",
            f"{UPLOADS}test_a_damaged_copy_is_skipped_and_only_damaged_ones_stop_the_start",
            "distributed/test_checkpoint_sites.py"
            "::test_all_nodes_take_the_older_one_where_the_newest_is_damaged",
        ),
    ),
    Fault(
        "U5",
        "a store that is full, away, refuses, or loses the cable of one node",
        "0",
        "done, with what has no copy",
        "warned, counted in metrics; training goes on; the next copy is made",
        "what the store had",
        NOT_TRIED,
        (
            f"{UPLOADS}test_a_store_that_takes_nothing_more_is_told_and_training_goes_on",
            f"{COPIES}test_a_full_store_is_told_and_training_goes_on",
            "distributed/test_checkpoint_sites.py"
            "::test_a_copy_that_fails_on_one_node_fails_on_all_and_the_next_is_made",
        ),
    ),
    Fault(
        "U6",
        "a store slower than checkpoints come",
        "0",
        "done",
        "gets the newest; nothing waits, nothing that is being copied is removed",
        "the same is trained",
        NOT_TRIED,
        (
            f"{UPLOADS}test_a_slow_store_gets_the_newest_and_the_same_is_trained",
            f"{COPIES}test_a_slow_store_gets_the_newest_and_nothing_waits_for_it",
        ),
    ),
    Fault(
        "U7",
        "at the start: store away, refusing, no bucket, a password in the address",
        "4, password 2",
        "failed",
        "address, variable or key are named; no secret is shown",
        "-",
        NOT_TRIED,
        (
            f"{UPLOADS}test_what_is_wrong_with_the_store_at_the_start_is_named",
            f"{COPIES}test_a_store_that_cannot_be_asked_stops_the_start",
        ),
    ),
    Fault(
        "U8",
        "nodes that share no directory; other nodes, fewer nodes, one process",
        "-",
        "-",
        "all go on from the copies",
        "every bit of parameters and moments",
        NOT_TRIED,
        ("distributed/test_checkpoint_sites.py::test_what_two_nodes_saved_is_resumed_by_others",),
    ),
    Fault(
        "U9",
        "retention, other courses and newer formats in the store",
        "newer format 4",
        "-",
        "only what is whole counts; nothing that might be wanted goes",
        "what is set aside can be put back",
        NOT_TRIED,
        (
            f"{COPIES}test_retention_counts_what_is_whole",
            f"{COPIES}test_what_training_does_not_go_on_from_is_set_aside_and_stays",
            f"{COPIES}test_a_newer_format_stops_the_start_and_stays",
        ),
    ),
    # Data
    Fault(
        "F21",
        "SIGKILL of a data worker",
        "3",
        "failed",
        "named within ten seconds",
        "-",
        PASS,
        (f"{LOADER}test_a_killed_worker_is_an_error_within_ten_seconds",),
    ),
    Fault(
        "F22",
        "pictures that are text, cut off, damaged inside of a shard; too many of them",
        "0, above the limit 3",
        "done or failed",
        "skipped, counted, named once",
        "order and content of all other samples",
        "pass, 12 kinds",
        (
            f"{TRAIN}test_corrupt_samples_within_the_limit_are_named",
            f"{TRAIN}test_too_many_corrupt_samples_stop_all_ranks",
            f"{LOADER}test_all_other_samples_stay_where_they_are",
            f"{HOSTILE}test_damage_in_a_picture_costs_that_picture",
            f"{HOSTILE}test_damage_inside_a_shard_costs_the_samples_beside_it",
            "unit/data/test_images.py::test_truncated_files_pass_the_header_and_fail_when_decoded",
        ),
    ),
    Fault(
        "F22",
        "damaged row groups of parquet, files without a footer",
        "no footer 3",
        "-",
        "their rows are skipped; all files without a footer are named",
        "all other rows",
        "FAIL: a bad row group stopped the source",
        (
            "unit/data/test_parquet_damage.py::test_a_damaged_row_group_costs_its_rows",
            "unit/data/test_parquet_damage.py::test_files_without_a_footer_are_all_named",
        ),
    ),
    Fault(
        "F22, R5",
        "tar shards that lost their tail, in a member and between members",
        "3",
        "failed",
        "all of them are named; between members: warned",
        "whole shards are read without a word",
        "FAIL: 12 of 40 samples gone, no word",
        (
            "unit/data/test_torn_tars.py::test_a_torn_tail_is_an_error_that_names_the_file",
            "unit/data/test_torn_tars.py::test_a_tail_torn_between_members_is_warned_of",
            "unit/data/test_torn_tars.py::test_all_torn_shards_are_named_at_once",
        ),
    ),
    Fault(
        "F23",
        "bombs: 100 and 400 megapixels, aspect ratios, bombs in headers",
        "-",
        "-",
        "refused by the header",
        "memory",
        PASS,
        (
            "unit/data/test_images.py::test_bad_headers_are_refused_without_memory",
            "unit/data/test_images.py::test_header_check_does_not_decode",
        ),
    ),
    Fault(
        "F24",
        "gray, bilevel, palettes, transparency, 16 bits, float, CMYK, every EXIF rotation",
        "-",
        "-",
        "one conversion each",
        "pixels",
        PASS,
        (
            "unit/data/test_images.py::test_transparency_is_laid_over_white",
            "unit/data/test_images.py::test_gray_and_bilevel_become_three_equal_channels",
            "unit/data/test_images.py::test_high_bit_depths_are_scaled_not_clipped",
            "unit/data/test_images.py::test_non_finite_pixels_are_corrupt",
            "unit/data/test_images.py::test_cmyk_becomes_rgb",
            "unit/data/test_images.py::test_exif_rotation_is_applied_and_known_from_the_header",
        ),
    ),
    Fault(
        "F25",
        "special tokens and turns forged in text, NUL, lone surrogates, megabytes of it",
        "-",
        "-",
        "text stays text; what cannot be is corrupt; no more is tokenised than a sample keeps",
        "-",
        "pass; text without limit",
        (
            "unit/data/test_text.py::test_special_tokens_in_text_stay_text",
            "unit/data/test_text.py::test_messages_cannot_forge_a_turn",
            "unit/data/test_text.py::test_odd_characters_are_kept",
            "unit/data/test_text.py::test_a_lone_surrogate_is_corrupt",
            "unit/data/test_text.py::test_texts_that_no_sample_could_keep_are_never_tokenised",
            "unit/data/test_text.py::test_malformed_chats_are_corrupt",
        ),
    ),
    Fault(
        "F26",
        "ranks whose batch has no image, beside others that have some",
        "-",
        "-",
        "no rank waits for ever",
        "losses and gradients of one process",
        PASS,
        ("distributed/test_train_models.py::test_ranks_without_images_join_those_with",),
    ),
    Fault(
        "F27",
        "reordered batches",
        "-",
        "-",
        "the same is trained",
        "losses and gradients of one process in natural order",
        PASS,
        (
            "distributed/test_train_reordering.py"
            "::test_losses_and_gradients_are_those_of_one_process_in_natural_order",
        ),
    ),
    Fault(
        "R8, S3",
        "records nested deep, of 200 MB, with NULs and surrogates in names; files that are FIFOs, "
        "devices, links, too large; all of that in seven formats, also after they were measured",
        "-",
        "-",
        "one sample each",
        "all other samples",
        "FAIL, 13 rows: tracebacks, hangs, memory",
        (
            f"{HOSTILE}test_hostile_files",
            f"{HOSTILE}test_files_that_become_hostile_after_they_were_measured",
            f"{HOSTILE}test_hostile_names",
            f"{HOSTILE}test_hostile_text",
            f"{HOSTILE}test_source_files_that_change_while_training",
            f"{HOSTILE}test_headers_and_parts_of_any_size_are_not_read",
            f"{HOSTILE}test_damaged_indices_of_shards_are_not_believed",
        ),
    ),
    Fault(
        "S4",
        "parquet bombs: rows that take no bytes, groups larger than memory may be",
        "3",
        "-",
        "refused by the footer",
        "memory and disk",
        "FAIL: 576 bytes became 800 MB and went on",
        (
            "unit/data/test_parquet_damage.py"
            "::test_rows_that_take_no_bytes_are_refused_by_the_footer",
            "unit/data/test_parquet_damage.py"
            "::test_a_group_larger_than_memory_may_be_is_not_decompressed",
        ),
    ),
    Fault(
        "F22",
        "sources in an object store that is away, refuses, has no bucket, sends wrong bytes",
        "3, away for a while 0",
        "failed or done",
        "address and remedy are named; no secret is shown",
        "killed and resumed with the store away: bit by bit",
        NOT_TRIED,
        (
            "faults/test_stores.py"
            "::test_faults_that_last_end_with_code_3_and_name_address_and_remedy",
            "faults/test_stores.py::test_killed_and_resumed_with_the_store_away_meanwhile",
            "faults/test_stores.py::test_slow_or_away_for_20_seconds_while_training",
        ),
    ),
    Fault(
        "F22",
        "a source of which nothing can be used",
        "3",
        "failed",
        "before weights are read, with ten samples and their lines",
        "-",
        NOT_TRIED,
        (f"{TRAIN}test_a_source_that_gives_nothing_ends_the_run_before_weights_are_read",),
    ),
    Fault(
        "F21",
        "producers that are killed, busy, of other data, or nobody",
        "3, one killed 0",
        "failed or done",
        "another one is asked; what is refused is named",
        "losses and weights bit by bit",
        PASS,
        (
            "faults/test_disaggregated_faults.py"
            "::test_what_producers_refuse_ends_the_run_and_is_named",
            "faults/test_disaggregated_faults.py"
            "::test_a_killed_producer_and_a_killed_rank_cost_no_sample",
        ),
    ),
    # Numbers, recipes, trackers
    Fault(
        "F28",
        "a loss that is NaN on one rank; weights that overflow",
        "5",
        "failed",
        "all ranks stop before the update; the module where it began is named",
        "parameters bit by bit; the rerun ends bit by bit",
        PASS,
        (
            f"{SMALL}test_nan_on_one_rank_stops_all_with_parameters_unchanged",
            f"{TRAIN}test_non_finite_numbers_stop_all_and_leave_a_good_checkpoint",
            "unit/parallel/test_health.py::test_non_finite_values_are_named_with_step_and_rank",
        ),
    ),
    Fault(
        "F29, F30, R11",
        "recipes: unknown, doubled, misspelt keys, wrong types, sizes that cannot be, infinite and "
        "endless numbers, arrays 1,000 deep, 2,000 mistakes, credentials",
        "2",
        "failed, where ranks could start",
        "before ranks meet; file, key and remedy are named",
        "-",
        "pass, 31; FAIL: depth, infinite, endless, 445 kB of message",
        (
            f"{STARTS}test_bad_recipes_are_refused_by_key",
            f"{TRAIN}test_a_bad_recipe_lists_all_mistakes",
            f"{TRAIN}test_mistakes_in_the_model_are_told_once_and_before_ranks_meet",
        ),
    ),
    Fault(
        "F31",
        "trackers that cannot be reached, die, hang, do not end",
        "0",
        "done",
        "warned once; training goes on",
        "metrics.jsonl whole",
        PASS,
        (
            f"{METRICS}test_a_tracker_that_dies_is_warned_of_once",
            f"{METRICS}test_a_tracker_that_cannot_start_is_warned_of_once",
            f"{METRICS}test_a_hanging_tracker_neither_slows_steps_nor_the_end",
            f"{METRICS}test_a_tracker_that_does_not_finish_is_left_behind",
            f"{METRICS}test_unreachable_wandb_records_offline_and_leaves_training_alone",
        ),
    ),
    # Security
    Fault(
        "F32",
        "pickles in the place of each file of a checkpoint, and in tar files",
        "4, in data -",
        "-",
        "none runs",
        "no sentinel file",
        "pass; .pth in a tar ended the run",
        (
            f"{DAMAGE}test_pickles_never_run",
            f"{HOSTILE}test_pickled_parts_stay_bytes",
            "unit/data/test_sources.py::test_pickles_in_a_tar_do_not_run",
        ),
    ),
    Fault(
        "F33, S1",
        "models and tokenizers that bring their own code",
        "2",
        "-",
        "refused, without asking",
        "no sentinel file",
        'FAIL: "y" at a prompt ran it',
        (
            "unit/models/test_foreign_code.py::test_a_model_with_its_own_code_is_refused",
            "unit/models/test_foreign_code.py::test_a_tokenizer_with_its_own_code_is_refused",
        ),
    ),
    Fault(
        "F33, S2",
        "producers on other machines without certificate or token; a wrong token; an unknown "
        "certificate",
        "2, wrong token 3",
        "-",
        "refused before anything is sent",
        "-",
        "FAIL: the token left in clear text",
        (
            "unit/recipe/test_recipe.py::test_nothing_goes_to_producers_elsewhere_unencrypted",
            "unit/data/test_producers.py::test_other_machines_need_a_certificate_and_a_token",
            "unit/data/test_producers.py::test_a_wrong_token_is_refused",
            "unit/data/test_producers.py::test_an_unknown_certificate_is_not_trusted",
        ),
    ),
    Fault(
        "S6",
        "requests to producers that are none, of other versions, or for what no step has",
        "-",
        "-",
        "refused with the reason; a request has no sizes that could be believed",
        "memory",
        "FAIL: 745 GiB were asked for",
        (
            "unit/data/test_producers.py::test_what_is_no_request_is_said",
            "unit/data/test_producers.py"
            "::test_requests_cannot_make_a_producer_decode_what_no_step_has",
        ),
    ),
    Fault(
        "S7",
        "a producer that answers nonsense",
        "-",
        "-",
        "it is named, and another one is asked",
        "the batch",
        "FAIL: a traceback, code 1",
        (
            "unit/data/test_producers.py"
            "::test_answers_that_are_none_are_named_and_asked_for_elsewhere",
        ),
    ),
    Fault(
        "S5",
        "ids of the hub that are misspelt paths",
        "2",
        "-",
        "told from each other; revision pins a commit",
        "-",
        "FAIL: dtaa/x became an id",
        ("unit/data/test_sources.py::test_hub_ids_are_told_from_missing_paths",),
    ),
    # Processes beside a run
    Fault(
        "P1",
        "the process that reads a stream for all ranks is stopped, killed; someone guesses",
        "3",
        "-",
        "named with its process after data.timeout_s; who has not the secret gets no answer",
        "-",
        NOT_TRIED,
        (
            f"{READER}test_a_reader_that_was_killed_or_stopped_is_named",
            f"{READER}test_only_who_knows_the_secret_is_answered",
        ),
    ),
    Fault(
        "P2",
        "mistakes in the data of a stream that another process reads",
        "3",
        "-",
        "told to every rank",
        "-",
        NOT_TRIED,
        (f"{READER}test_mistakes_in_the_data_are_told_to_every_rank",),
    ),
    Fault(
        "P3",
        "producers that leave, are killed and are added in a run; a registry that goes",
        "-",
        "-",
        "who is there is asked, who was killed forgotten; the run goes on without its registry",
        "every batch",
        NOT_TRIED,
        (
            f"{REGISTRY}test_producers_come_and_go_in_a_run",
            f"{REGISTRY}test_a_run_goes_on_without_its_registry",
        ),
    ),
    Fault(
        "P3",
        "a registry that is not there; producers of other data; reports that are none",
        "3",
        "-",
        "named with the key; not asked; refused",
        "-",
        NOT_TRIED,
        (
            f"{REGISTRY}test_a_registry_that_is_not_there_is_named",
            f"{REGISTRY}test_producers_of_other_data_are_not_asked",
            f"{REGISTRY}test_registries_want_the_token_and_reports_as_they_are",
        ),
    ),
    Fault(
        "P4",
        "steps planned by producers: other recipes, answers and requests that are nonsense",
        "3",
        "-",
        "refused by key; not taken for a step",
        "-",
        NOT_TRIED,
        (
            f"{PLANNED}test_other_recipes_are_refused_by_key",
            f"{PLANNED}test_nonsense_is_not_taken_for_a_step",
            f"{PLANNED}test_nonsense_is_refused",
        ),
    ),
    Fault(
        "P5",
        "the planning process is killed, stopped, cannot plan, is asked for steps of 1 MB",
        "0",
        "-",
        "no step waits for it",
        "steps are planned before they begin",
        NOT_TRIED,
        (
            f"{PLANNING}test_a_dead_process_is_told",
            f"{PLANNING}test_a_step_that_cannot_be_planned_is_told",
            f"{PLANNING}test_nobody_waits_for_a_process_that_was_stopped",
        ),
    ),
    Fault(
        "P5",
        "a planning process that dies once, dies always, finds no free core",
        "0",
        "-",
        "begun again after a pause; given up after some deaths, said; gets a share of the cores",
        "-",
        NOT_TRIED,
        (
            f"{PLANNING}test_a_process_that_died_is_started_again_after_a_pause",
            f"{PLANNING}test_one_that_always_dies_is_given_up",
            f"{PLANNING}test_one_that_is_starved_gets_a_share_of_the_cores",
        ),
    ),
    Fault(
        "P6",
        "one of three producers that Ray runs is killed, and one is added from outside",
        "0",
        "done",
        "the others are asked; Ray starts it again; the new one serves; none is left at the end",
        "losses and the last checkpoint bit by bit of a run without producers",
        NOT_TRIED,
        (f"{RAY}test_one_of_three_is_killed_and_one_is_added",),
        each=2,
    ),
    # Modules on ranks of their own
    Fault(
        "M1",
        "encoder, LLM and generator, each killed, stopped and hung; started again by hand",
        "6, then 0",
        "failed, then done",
        "the others end after parallel.timeout_s at the latest and name rank and process",
        "losses, no step missing or doubled, the last checkpoint bit by bit",
        NOT_TRIED,
        (f"{UNITS}test_a_unit_is_lost_and_the_same_command_goes_on",),
    ),
    Fault(
        "M2",
        "the encoder killed, the LLM hung, the generator stopped under torchrun --max-restarts",
        "0",
        "done",
        "torchrun starts all of them again",
        "losses, no step missing or doubled, the last checkpoint bit by bit",
        NOT_TRIED,
        (f"{UNITS}test_torchrun_restarts_all_units",),
    ),
    Fault(
        "M3",
        "the LLM is stopped while all save",
        "6",
        "failed",
        "it is missed by its heartbeat, though ranks wait half an hour for the slowest disk",
        "-",
        NOT_TRIED,
        (f"{UNITS}test_a_unit_that_is_stopped_in_a_save_is_missed_soon",),
    ),
    Fault(
        "M4",
        "a node with a replica of the encoder is lost, its launcher too, under --nnodes 1:2",
        "0",
        "done",
        "the replicas that the ranks that are left make go on",
        "every bit of a run with these sizes from that checkpoint, losses of all nodes to 1e-5",
        NOT_TRIED,
        (f"{UNITS}test_what_is_left_goes_on_when_a_node_of_the_encoder_is_lost",),
    ),
    # Schedulers
    Fault(
        "Q1",
        "Slurm signals a job of two nodes before its limit",
        "75, then 0",
        "preempted, then done",
        "it saves, and Slurm queues it again",
        "losses, no step missing or doubled, the last checkpoint bit by bit",
        NOT_TRIED,
        (f"{SLURM}test_a_preempted_job_is_queued_again_and_ends_with_the_same_bits",),
    ),
    # Exports
    Fault(
        "E1",
        "SIGKILL of an export, also while it replaces another",
        "-9",
        "-",
        "has no name; the next one removes its remains",
        "the export of before",
        NOT_TRIED,
        (
            f"{EXPORT}test_an_export_that_is_killed_has_no_name_and_the_next_one_removes_it",
            f"{EXPORT}test_an_export_that_is_killed_while_it_replaces_one_loses_neither",
        ),
    ),
    Fault(
        "E2",
        "disks too small for an export, at five sizes, of two models",
        "4",
        "-",
        "file and reason are named; nothing is left",
        "an export once there is room",
        NOT_TRIED,
        (f"{EXPORT}test_a_disk_that_is_too_small_leaves_nothing",),
        each=5,
    ),
    Fault(
        "E3",
        "a name that exists, no checkpoint, what cannot be exported, damage",
        "2 or 4",
        "-",
        "named; nothing is left",
        "what was there",
        NOT_TRIED,
        (
            f"{EXPORT}test_the_script_takes_a_run_and_says_what_is_wrong",
            f"{EXPORT}test_what_cannot_be_exported_leaves_nothing",
            f"{EXPORT}test_damage_and_older_checkpoints_are_told",
        ),
    ),
    Fault(
        "E4",
        "a hub that is not reached; one that refuses",
        "2",
        "-",
        "name, reason and HF_TOKEN are named",
        "the export on the disk",
        NOT_TRIED,
        (f"{EXPORT}test_an_export_is_pushed_and_stays_if_the_hub_refuses",),
        each=2,
    ),
]

REFUSED = [
    Refused(
        "R11",
        "a memory limit of the operating system on one rank",
        "what torch's or gloo's own threads cannot allocate ends that process, and no Python sees "
        "it; peers end with 6 after parallel.timeout_s",
    ),
    Refused(
        "S8",
        "torch's store listens on all interfaces, also with MASTER_ADDR=127.0.0.1",
        "torch offers no choice; SECURITY.md says to run in a network of the job's own",
    ),
    Refused(
        "S9",
        "processes of one run send each other pickled objects through torch",
        "collectives are trusted as the ranks are; no file is ever unpickled (SECURITY.md)",
    ),
    Refused(
        "S10",
        "files have mode 0644; W&B gets the recipe with its paths",
        "the mode is the umask's to say, as for all programs; what is sent is documented, and off "
        "unless switched on",
    ),
    Refused(
        "F12",
        "a disk that becomes read-only while training",
        "cannot be injected here, as open files stay writable; the errors it gives are those of a "
        "full disk",
    ),
]
"""Faults that stay as they are."""
