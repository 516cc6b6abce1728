"""Table of injected faults: the fault, the expected result, and the tests that inject it.

`write_page.py` writes tests/faults/README.md from `FAULTS` and the outcomes of the tests. `number`
is the number in a list of faults (F1 to F33), in a review of reliability (R, S) or of untrusted
files and limited systems (N), or a letter for later additions: U for uploaded checkpoints, P for
background processes, M for disaggregated modules, Q for schedulers, E for exports. Each case of a
test is one injection, or `each` of them.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A row of the table."""

    number: str
    what: str
    """Injected fault."""
    code: str
    """Exit code of the injection, then of a restart. If no train.py runs: of the exception."""
    status: str
    """State in STATUS.json, or "-" if the tests do not check it."""
    happens: str
    """Result, and what the error message names."""
    equal: str
    """State that must not change, or "-"."""
    shown_by: tuple[str, ...]
    """Test functions, as FILE::NAME below tests/."""
    each: int = 1
    """Injections per case of a test."""


class Refused(NamedTuple):
    """A known limitation."""

    number: str
    what: str
    why: str


TRAIN = "faults/test_train_faults.py::"
SMALL = "faults/test_faults.py::"
DIRECTORY = "faults/test_run_directory.py::"
DAMAGE = "unit/training/test_checkpoint_damage.py::"
SAVED = "unit/training/test_checkpoint.py::"
COPIES = "unit/extensions/remote/test_checkpoint_upload.py::"
UPLOADS = "faults/test_uploads.py::"
STARTS = "faults/test_bad_starts.py::"
HOSTILE = "unit/data/test_hostile_records.py::"
HUNG = "faults/test_hung_data.py::"
LOADER = "unit/data/test_loader.py::"
METRICS = "unit/training/test_metrics.py::"
READER = "unit/data/test_shared_reader.py::"
REGISTRY = "unit/extensions/remote/test_registry.py::"
PLANNED = "unit/extensions/remote/test_planned_by_producers.py::"
PLANNING = "unit/balance/pipeweaver/test_planning_process.py::"
STEPS = "unit/common/test_step_process.py::"
BESIDE = "unit/balance/pipeweaver/test_schedules_beside.py::"
EXPORT = "unit/training/test_export.py::"
PREEMPT = "unit/training/test_preempt.py::"
RAY = "faults/test_ray_runs.py::"
SLURM = "faults/test_slurm.py::"
VALUES = "unit/models/test_config_values.py::"
DAMAGED = "unit/models/test_damaged_files.py::"
EARLY = "faults/test_early_stop.py::"
LIMITED = "faults/test_limited_systems.py::"
CONNECTIONS = "unit/extensions/remote/test_connections.py::"
ANSWERS = "unit/extensions/remote/test_producer_answers.py::"
ENERGON = "unit/extensions/formats/test_hostile_energon.py::"
TEMPLATES = "unit/data/test_chat_limits.py::"
TEXTS = "unit/data/test_text_files.py::"
PAGES = "unit/extensions/reports/test_run_page.py::"
UNITS = "faults/test_unit_faults.py::"

FAULTS = [
    # Processes
    Fault(
        "F1",
        "SIGKILL or SIGSEGV of a rank during a step",
        "6 (killed: -9, -11)",
        "failed",
        "other ranks exit within seconds and name rank, process and step",
        "resumed run, bitwise",
        (
            f"{SMALL}test_a_killed_rank_is_named_and_the_run_resumes_exactly",
            f"{TRAIN}test_a_lost_peer_is_named",
        ),
    ),
    Fault(
        "F2",
        "five SIGKILLs under torchrun --max-restarts",
        "0",
        "done",
        "resumed each time",
        "losses, metrics, last checkpoint, bitwise",
        (f"{TRAIN}test_torchrun_recovers_from_five_kills_with_the_same_bits",),
        each=5,
    ),
    Fault(
        "F2",
        "one SIGKILL under torchrun with default settings",
        "0",
        "done",
        "resumed",
        "parameters, bitwise",
        (f"{SMALL}test_torchrun_restarts_a_killed_rank_and_ends_with_the_same_bits",),
    ),
    Fault(
        "F2",
        "loss of a node with its launcher, --nnodes 1:2",
        "0",
        "done",
        "the remaining node continues",
        "losses within 1e-5, every step once",
        (f"{TRAIN}test_what_is_left_goes_on_when_a_node_is_lost",),
    ),
    Fault(
        "F3",
        "SIGTERM to torchrun, with data workers",
        "75",
        "preempted",
        "all ranks save the same step",
        "resumed run, bitwise",
        (f"{TRAIN}test_sigterm_to_torchrun_saves_and_the_rerun_ends_with_the_same_bits",),
    ),
    Fault(
        "F4",
        "SIGTERM to one rank",
        "75",
        "preempted",
        "all ranks save the same step",
        "resumed run, bitwise",
        (f"{TRAIN}test_sigterm_to_one_rank_stops_all_at_the_same_step",),
    ),
    Fault(
        "F5",
        "SIGTERM and SIGINT to data workers",
        "-",
        "-",
        "ignored",
        "samples",
        (f"{LOADER}test_workers_ignore_launcher_signals",),
    ),
    Fault(
        "F6",
        "a second signal, also during the save",
        "75",
        "preempted",
        "first signal applies; one complete checkpoint",
        "resumed run, bitwise",
        (
            f"{SMALL}test_sigterm_to_one_rank_saves_the_same_step_on_all",
            f"{PREEMPT}test_signal_sets_flag_only",
            f"{PREEMPT}test_first_signal_is_recorded",
        ),
    ),
    Fault(
        "F7",
        "a rank that sleeps or is stopped",
        "6",
        "failed",
        "other ranks time out and name rank, step and phase",
        "-",
        (f"{SMALL}test_a_rank_that_stands_still_is_named_in_time",),
    ),
    Fault(
        "F7, R1",
        "stopped data workers; a file that does not respond",
        "3 (other ranks: 6)",
        "failed",
        "after `data.timeout_s`; error names worker, samples and waiting rank",
        "-",
        (
            f"{HUNG}test_the_run_ends_and_names_workers_and_samples",
            f"{HUNG}test_peers_name_the_rank_that_waits_for_data",
            "unit/data/test_waiting.py::test_stopped_worker_is_reported_and_killed",
            "unit/data/test_waiting.py::test_unresponsive_file_raises_after_timeout",
        ),
    ),
    Fault(
        "R1",
        "SIGTERM while a rank waits for data",
        "75",
        "preempted",
        "all ranks save the last complete step",
        "every step once",
        (f"{HUNG}test_a_stop_signal_ends_a_wait_for_data_and_saves",),
    ),
    Fault(
        "F8",
        "a rank with a slow device, memory or link",
        "0",
        "done",
        "warning before the first step; `slowest_rank` in metrics",
        "-",
        (
            "distributed/test_preflight.py::test_two_ranks_compare_themselves",
            "distributed/test_preflight.py::test_the_slow_rank_is_named_with_its_machine",
            f"{METRICS}test_rates_are_summed_and_times_are_maxima",
        ),
    ),
    Fault(
        "F9",
        "exception on one rank",
        "1 (other ranks: 6)",
        "failed",
        "STATUS.json has its message",
        "-",
        (f"{SMALL}test_an_exception_on_one_rank_ends_all_and_is_the_reported_cause",),
    ),
    Fault(
        "R9",
        "machines with wrong clocks",
        "6",
        "failed",
        "error names the silent rank",
        "-",
        ("unit/parallel/test_health.py::test_a_silent_rank_is_named_whatever_its_clock_says",),
    ),
    Fault(
        "R11",
        "a rank that never starts, or exits during initialization",
        "6",
        "failed",
        "other ranks exit after `parallel.timeout_s`",
        "-",
        (
            f"{TRAIN}test_a_peer_that_never_comes_is_waited_for_only_so_long",
            f"{STARTS}test_a_rank_that_dies_while_groups_are_made_is_not_waited_for",
        ),
    ),
    Fault(
        "R11",
        "another program on MASTER_PORT that does not respond",
        "6",
        "failed",
        "all ranks exit after `parallel.timeout_s`",
        "-",
        (f"{STARTS}test_a_mute_program_on_the_port_is_not_waited_for",),
    ),
    Fault(
        "R11",
        "invalid, contradictory or missing RANK, WORLD_SIZE and similar variables",
        "2",
        "not written",
        "error names the variable",
        "-",
        (
            f"{STARTS}test_bad_environments_are_refused_by_variable",
            f"{STARTS}test_train_ends_with_2_and_no_traceback",
        ),
    ),
    Fault(
        "F1",
        "process with data workers: killed, idle, or exits with stopped workers",
        "-9",
        "-",
        "no worker remains",
        "-",
        (
            "faults/test_data_workers.py::test_workers_end_when_their_process_is_killed",
            "faults/test_data_workers.py::test_a_process_with_idle_workers_exits_at_once",
            "faults/test_data_workers.py::test_a_process_with_stopped_workers_exits_too",
        ),
    ),
    # Checkpoints
    Fault(
        "F10",
        "SIGKILL of ranks at 30 random times of a save",
        "-9",
        "-",
        "incomplete saves are never loaded; the previous one is",
        "parameters and optimizer states, bitwise",
        ("faults/test_kill_while_saving.py::test_thirty_kills_leave_only_whole_checkpoints",),
        each=30,
    ),
    Fault(
        "F10",
        "SIGKILL during a save of train.py",
        "-9 (other rank: 6)",
        "failed, then done",
        "only this save is lost; its files are removed",
        "resumed run, bitwise",
        (f"{TRAIN}test_kill_while_saving_in_the_background_loses_only_that_save",),
    ),
    Fault(
        "F11",
        "saving the same step twice",
        "-",
        "-",
        "the first checkpoint remains",
        "its bytes",
        (f"{SAVED}test_step_is_not_saved_twice",),
    ),
    Fault(
        "F12, R4",
        "full disk at each file of a save, synchronous and asynchronous",
        "4",
        "-",
        "error names file, required and free bytes; next save works",
        "older checkpoints",
        (
            f"{DAMAGE}test_full_disk_is_reported_without_damage",
            f"{DAMAGE}test_tmpfs_that_is_full_is_reported",
            f"{DAMAGE}test_different_write_errors_preserve_their_message",
        ),
    ),
    Fault(
        "F12, R4",
        "train.py with a disk too small for a checkpoint or the export",
        "4",
        "failed",
        "error names file and reason; restart works with free space",
        "checkpoints",
        (
            f"{DIRECTORY}test_a_disk_too_small_for_a_checkpoint",
            f"{DIRECTORY}test_a_disk_that_fills_up_while_training",
            f"{DIRECTORY}test_a_disk_too_small_for_the_export",
        ),
    ),
    Fault(
        "R4",
        "read-only or impossible `output_dir` or `data.index_cache_dir`",
        "2",
        "failed if writable",
        "before initialization; error names key, file and reason",
        "-",
        (
            f"{DIRECTORY}test_a_read_only_output_directory",
            f"{DIRECTORY}test_a_directory_that_cannot_be",
        ),
    ),
    Fault(
        "R4, R7",
        "STATUS.json on a full disk, not replaceable, or with two writers",
        "as without fault",
        "correct or removed",
        "never incomplete or outdated",
        "-",
        (
            f"{PREEMPT}test_status_is_written_on_full_disk",
            f"{PREEMPT}test_status_that_cannot_be_replaced_is_removed",
            f"{PREEMPT}test_readers_never_read_incomplete_status",
            f"{PREEMPT}test_first_failure_replaces_lost_peer_in_any_order",
            "unit/training/test_ending.py::test_unwritable_status_preserves_first_error",
            "unit/training/test_ending.py::test_error_of_closing_preserves_first_error",
        ),
    ),
    Fault(
        "R7",
        "empty, truncated, nested or newer STATUS.json of an earlier run",
        "as without fault",
        "replaced",
        "ignored",
        "-",
        (
            f"{PREEMPT}test_unreadable_old_status_is_ignored",
            f"{PREEMPT}test_status_of_newer_version_ignores_unknown_fields",
        ),
    ),
    Fault(
        "F13",
        "50 random changes of checkpoint files: bits, pages, truncation, growth, missing, swapped",
        "-",
        "-",
        "all detected; the previous step is used",
        "bytes of the previous step",
        (f"{DAMAGE}test_fifty_changes_are_detected_and_previous_step_used",),
        each=50,
    ),
    Fault(
        "F13",
        "shards of another step, renamed steps, damaged named checkpoint, all damaged",
        "4",
        "failed",
        "error names the file; never a fresh start",
        "files",
        (
            f"{DAMAGE}test_shards_of_different_step_are_rejected",
            f"{DAMAGE}test_renamed_step_is_rejected",
            f"{DAMAGE}test_only_damaged_checkpoints_are_an_error",
            f"{TRAIN}test_a_damaged_checkpoint_is_refused_by_name",
        ),
    ),
    Fault(
        "F13, R3",
        "checkpoint of a newer format",
        "4",
        "failed",
        "nothing is renamed, removed or counted",
        "all files",
        (
            f"{DAMAGE}test_checkpoint_of_newer_version_stops_start",
            f"{DAMAGE}test_named_checkpoint_resumes_despite_newer_version",
            f"{DAMAGE}test_retention_ignores_checkpoints_of_newer_versions",
        ),
    ),
    Fault(
        "F13, R3, R8",
        "manifests with missing keys; JSON nested 100,000 levels",
        "-",
        "-",
        "damaged; the previous step is used",
        "-",
        (
            f"{DAMAGE}test_manifest_without_required_value_is_damaged",
            f"{DAMAGE}test_deeply_nested_files_are_damaged",
        ),
    ),
    Fault(
        "F14",
        "incomplete or damaged checkpoints newer than a valid one",
        "-",
        "-",
        "the valid one is kept by retention; remains are removed",
        "valid checkpoint, bitwise",
        (
            f"{SAVED}test_damaged_directories_do_not_displace_valid_checkpoint",
            f"{SAVED}test_temporary_directories_of_killed_runs_are_removed",
        ),
    ),
    Fault(
        "F15",
        "stop and resume with the same parallelism",
        "-",
        "-",
        "continues",
        "losses, parameters, optimizer states, random states, samples, bitwise",
        (f"{LOADER}test_resume_is_exact_with_any_workers",),
    ),
    Fault(
        "F16, R10",
        "two epochs with a resume; sequences that no sample fits into",
        "-",
        "-",
        "every sample once, within `data.packing_max_wait_steps`",
        "all samples",
        (
            f"{LOADER}test_two_epochs_have_each_sample_twice",
            "unit/data/test_packing.py::test_packs_contain_each_item_without_overflow",
            "unit/data/test_packing.py::test_old_open_pack_is_closed_by_age",
        ),
    ),
    Fault(
        "F17",
        "resume among 1 process, FSDP2, HSDP, TP and combinations on 1, 2, 4 ranks",
        "-",
        "-",
        "loads",
        "parameters and optimizer states, bitwise",
        ("distributed/test_checkpoint_layouts.py::test_any_layout_loads_into_any_other",),
    ),
    Fault(
        "F18",
        "resume with a different number of ranks",
        "-",
        "-",
        "continues",
        "sample order",
        (f"{LOADER}test_loader_resumes_with_different_world_size",),
    ),
    Fault(
        "F19",
        "different names, shapes, dtypes, frozen parameters",
        "4",
        "failed",
        "error lists all differences before loading",
        "model values",
        (
            f"{SAVED}test_missing_and_extra_names_are_rejected",
            f"{SAVED}test_different_shapes_and_dtypes_change_no_state",
            f"{SAVED}test_different_frozen_parameters_are_rejected",
            f"{TRAIN}test_a_finished_run_says_so_and_a_changed_model_is_refused",
        ),
    ),
    Fault(
        "F20",
        "parameters that change during an asynchronous save",
        "-",
        "-",
        "values at the call are saved",
        "bitwise",
        (f"{SAVED}test_asynchronous_save_stores_values_of_call",),
    ),
    Fault(
        "R2",
        "changed samples, order, weights, filters or settings since the checkpoint",
        "4",
        "failed",
        "error names the change; `checkpoint.allow_data_change` accepts it",
        "harmless changes are accepted",
        (
            "unit/data/test_changed_data.py::test_changed_data_is_rejected_unless_accepted",
            "unit/data/test_changed_data.py::test_changed_chat_loss_mask_is_rejected",
            "unit/data/test_changed_data.py::test_changed_stream_files_are_rejected",
            f"{TRAIN}test_changed_data_are_refused_or_gone_on_with_as_the_recipe_says",
        ),
    ),
    Fault(
        "R6",
        "second run in the directory of a running one, also with an invalid recipe",
        "4 (invalid recipe: 2)",
        "of the first run",
        "error names process and host",
        "files of the first run",
        (
            f"{DIRECTORY}test_a_run_in_the_directory_of_another_touches_nothing",
            f"{SAVED}test_second_process_is_rejected",
        ),
    ),
    Fault(
        "R11",
        "a file with the name of a checkpoint",
        "4 if created later",
        "-",
        "renamed at the start; later: error",
        "its content",
        (f"{SAVED}test_file_named_like_checkpoint_is_set_aside",),
        each=2,
    ),
    # Copies
    Fault(
        "U1",
        "10 SIGKILLs at random times of a run with uploads, on changing machines",
        "-9, then 0",
        "-",
        "continues from its disk or from uploads; incomplete data are ignored",
        "every start, upload and the end, bitwise",
        ("faults/test_kill_while_training.py::test_ten_kills_lose_nothing_and_tear_nothing",),
        each=10,
    ),
    Fault(
        "U2",
        "loss of a machine with its disks",
        "-9, then 0",
        "done",
        "another machine continues from the latest upload",
        "losses and last checkpoint, bitwise",
        (f"{UPLOADS}test_a_lost_machine_costs_only_the_steps_since_the_last_copy",),
    ),
    Fault(
        "U3",
        "SIGKILL during an upload; manifests and files of incomplete uploads",
        "-9, then 0",
        "done",
        "ignored, then repeated or removed",
        "weights on another machine",
        (
            f"{UPLOADS}test_killed_while_copying_then_resumed_and_copied_again",
            f"{COPIES}test_upload_without_manifest_is_repeated",
            f"{COPIES}test_incomplete_upload_is_removed_by_next_upload",
            f"{COPIES}test_upload_with_missing_file_is_not_committed",
        ),
    ),
    Fault(
        "U4",
        "random damage of uploaded checkpoints, also of all of them",
        "0 (none left: 4)",
        "done or failed",
        "detected by hash on all ranks; the previous one is used",
        "older upload, bitwise",
        (
            f"{COPIES}test_damaged_upload_is_skipped_for_older_one",
            f"{COPIES}test_start_fails_if_all_uploads_are_damaged",
            f"{UPLOADS}test_a_damaged_copy_is_skipped_and_only_damaged_ones_stop_the_start",
            "distributed/test_checkpoint_sites.py"
            "::test_all_nodes_take_the_older_one_where_the_newest_is_damaged",
        ),
    ),
    Fault(
        "U5",
        "object store: full, unreachable, rejecting, or unreachable from one node",
        "0",
        "done, lists missing uploads",
        "warning and metric; training continues; next upload works",
        "stored objects",
        (
            f"{UPLOADS}test_a_store_that_takes_nothing_more_is_told_and_training_goes_on",
            f"{COPIES}test_full_store_is_reported_and_training_continues",
            "distributed/test_checkpoint_sites.py"
            "::test_a_copy_that_fails_on_one_node_fails_on_all_and_the_next_is_made",
        ),
    ),
    Fault(
        "U6",
        "uploads slower than checkpoints",
        "0",
        "done",
        "the latest is uploaded; training does not wait",
        "training result",
        (
            f"{UPLOADS}test_a_slow_store_gets_the_newest_and_the_same_is_trained",
            f"{COPIES}test_slow_store_receives_newest_checkpoint",
        ),
    ),
    Fault(
        "U7",
        "at the start: unreachable store, rejected, missing bucket, password in the URL",
        "4 (password: 2)",
        "failed",
        "error names URL, variable or key; secrets are hidden",
        "-",
        (
            f"{UPLOADS}test_what_is_wrong_with_the_store_at_the_start_is_named",
            f"{COPIES}test_unreachable_store_stops_start",
        ),
    ),
    Fault(
        "U8",
        "nodes without a shared directory; other nodes, fewer nodes, one process",
        "-",
        "-",
        "all resume from uploads",
        "parameters and optimizer states, bitwise",
        ("distributed/test_checkpoint_sites.py::test_what_two_nodes_saved_is_resumed_by_others",),
    ),
    Fault(
        "U9",
        "retention, other runs and newer formats in the object store",
        "4 for newer format",
        "-",
        "only complete uploads count; none that may be needed is removed",
        "set-aside uploads",
        (
            f"{COPIES}test_remote_retention_counts_complete_uploads",
            f"{COPIES}test_uploads_after_resumed_step_are_set_aside",
            f"{COPIES}test_upload_of_newer_format_stops_start",
        ),
    ),
    # Data
    Fault(
        "F21",
        "SIGKILL of a data worker",
        "3",
        "failed",
        "error within ten seconds",
        "-",
        (f"{LOADER}test_killed_worker_raises_within_ten_seconds",),
    ),
    Fault(
        "F22",
        "images that are text, truncated or damaged; too many of them",
        "0 (above the limit: 3)",
        "done or failed",
        "skipped, counted, logged once",
        "order and content of other samples",
        (
            f"{TRAIN}test_corrupt_samples_within_the_limit_are_named",
            f"{TRAIN}test_too_many_corrupt_samples_stop_all_ranks",
            f"{LOADER}test_corrupt_samples_do_not_move_others",
            f"{HOSTILE}test_damaged_image_in_shard_costs_one_sample",
            f"{HOSTILE}test_damaged_shard_costs_adjacent_samples",
            "unit/data/test_images.py::test_truncated_image_fails_when_decoded",
        ),
    ),
    Fault(
        "F22",
        "damaged parquet row groups; files without a footer",
        "3 without footer",
        "-",
        "rows are skipped; error names all files without a footer",
        "other rows",
        (
            "unit/data/test_parquet_damage.py::test_damaged_row_group_costs_its_rows",
            "unit/data/test_parquet_damage.py::test_all_files_without_footer_are_reported",
        ),
    ),
    Fault(
        "F22, R5",
        "truncated tar shards, within and between members",
        "3",
        "failed",
        "error names all of them; between members: warning",
        "complete shards",
        (
            "unit/data/test_torn_tars.py::test_truncated_shard_is_reported",
            "unit/data/test_torn_tars.py::test_shard_truncated_between_members_warns",
            "unit/data/test_torn_tars.py::test_all_truncated_shards_are_reported",
        ),
    ),
    Fault(
        "F23",
        "images of 100 and 400 megapixels, extreme aspect ratios, large headers",
        "-",
        "-",
        "rejected by the header",
        "memory",
        (
            "unit/data/test_images.py::test_invalid_header_is_rejected_without_decoding",
            "unit/data/test_images.py::test_header_check_does_not_decode",
        ),
    ),
    Fault(
        "F24",
        "gray, bilevel, palette, alpha, 16-bit, float, CMYK images, all EXIF rotations",
        "-",
        "-",
        "defined conversion",
        "pixels",
        (
            "unit/data/test_images.py::test_transparency_is_blended_with_white",
            "unit/data/test_images.py::test_gray_and_bilevel_become_rgb",
            "unit/data/test_images.py::test_high_bit_depths_are_scaled",
            "unit/data/test_images.py::test_non_finite_pixels_are_corrupt",
            "unit/data/test_images.py::test_cmyk_becomes_rgb",
            "unit/data/test_images.py::test_exif_rotation_is_applied_to_size_and_pixels",
        ),
    ),
    Fault(
        "F25",
        "special tokens and chat turns in text, NUL, lone surrogates, megabytes of text",
        "-",
        "-",
        "ordinary text, or corrupt; tokenization is bounded",
        "-",
        (
            "unit/data/test_text.py::test_special_tokens_in_text_stay_text",
            "unit/data/test_text.py::test_message_text_cannot_forge_turn",
            "unit/data/test_text.py::test_unusual_characters_are_preserved",
            "unit/data/test_text.py::test_lone_surrogate_is_corrupt",
            "unit/data/test_text.py::test_too_long_text_is_not_tokenized",
            "unit/data/test_text.py::test_malformed_chat_is_corrupt",
        ),
    ),
    Fault(
        "F26",
        "ranks whose batch has no image",
        "-",
        "-",
        "no rank waits",
        "losses and gradients of one process",
        ("distributed/test_train_models.py::test_ranks_without_images_join_those_with",),
    ),
    Fault(
        "F27",
        "reordered batches",
        "-",
        "-",
        "same training",
        "losses and gradients of one process",
        (
            "distributed/test_train_reordering.py"
            "::test_losses_and_gradients_are_those_of_one_process",
        ),
    ),
    Fault(
        "R8, S3",
        "deeply nested or 200 MB records, NUL, surrogates; FIFOs, devices, links, large files, "
        "in seven formats",
        "-",
        "-",
        "one corrupt sample each",
        "other samples",
        (
            f"{HOSTILE}test_hostile_file_costs_one_sample",
            f"{HOSTILE}test_file_damaged_after_indexing_costs_one_sample",
            f"{HOSTILE}test_hostile_file_name_costs_one_sample",
            f"{HOSTILE}test_hostile_text_costs_one_sample",
            f"{HOSTILE}test_changed_source_files_cost_their_samples",
            f"{HOSTILE}test_tar_header_with_huge_size_is_rejected",
            f"{HOSTILE}test_damaged_shard_index_is_ignored",
        ),
    ),
    Fault(
        "S4",
        "parquet files with oversized rows or row groups",
        "3",
        "-",
        "rejected by the footer",
        "memory and disk",
        (
            "unit/data/test_parquet_damage.py::test_rows_without_bytes_are_rejected",
            "unit/data/test_parquet_damage.py::test_row_group_beyond_memory_limit_is_rejected",
        ),
    ),
    Fault(
        "F22",
        "object store of a source: unreachable, rejecting, no bucket, wrong bytes",
        "3 (temporary: 0)",
        "failed or done",
        "error names URL and fix; secrets are hidden",
        "resumed run, bitwise",
        (
            "faults/test_stores.py"
            "::test_faults_that_last_end_with_code_3_and_name_address_and_remedy",
            "faults/test_stores.py::test_killed_and_resumed_with_the_store_away_meanwhile",
            "faults/test_stores.py::test_slow_or_away_for_20_seconds_while_training",
        ),
    ),
    Fault(
        "F22",
        "source without usable samples",
        "3",
        "failed",
        "before weights are loaded; error shows ten samples",
        "-",
        (f"{TRAIN}test_a_source_that_gives_nothing_ends_the_run_before_weights_are_read",),
    ),
    Fault(
        "F21",
        "remote data workers: killed, busy, with other data, none available",
        "3 (one killed: 0)",
        "failed or done",
        "the next one is used; error names the rejection",
        "losses and weights, bitwise",
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
        "NaN loss on one rank; overflowing weights",
        "5",
        "failed",
        "all ranks stop before the update; error names the first module",
        "parameters and rerun, bitwise",
        (
            f"{SMALL}test_nan_on_one_rank_stops_all_with_parameters_unchanged",
            f"{TRAIN}test_non_finite_numbers_stop_all_and_leave_a_good_checkpoint",
            "unit/parallel/test_health.py::test_non_finite_values_are_named_with_step_and_rank",
        ),
    ),
    Fault(
        "F29, F30, R11",
        "recipes: unknown or duplicate keys, wrong types, impossible sizes, infinite numbers, "
        "deep arrays, 2,000 errors, credentials",
        "2",
        "failed if ranks started",
        "before initialization; error names file, key and fix",
        "-",
        (
            f"{STARTS}test_bad_recipes_are_refused_by_key",
            f"{TRAIN}test_a_bad_recipe_lists_all_mistakes",
            f"{TRAIN}test_model_mistakes_fail_before_rendezvous",
        ),
    ),
    Fault(
        "F31",
        "trackers: unreachable, crashing, hanging",
        "0",
        "done",
        "one warning; training continues",
        "complete metrics.jsonl",
        (
            f"{METRICS}test_failed_tracker_warns_once",
            f"{METRICS}test_tracker_that_cannot_start_warns_once",
            f"{METRICS}test_blocked_tracker_delays_neither_steps_nor_exit",
            f"{METRICS}test_tracker_that_does_not_finish_is_abandoned",
            f"{METRICS}test_unreachable_wandb_records_offline",
        ),
    ),
    # Security
    Fault(
        "F32",
        "pickles in place of checkpoint files and in tar files",
        "4 (data: -)",
        "-",
        "never executed",
        "no side effect",
        (
            f"{DAMAGE}test_pickles_are_not_executed",
            f"{HOSTILE}test_pickled_members_are_not_loaded",
            "unit/data/test_sources.py::test_pickles_in_tar_are_not_loaded",
        ),
    ),
    Fault(
        "F33, S1",
        "models and tokenizers with remote code",
        "2",
        "-",
        "rejected without a prompt",
        "no side effect",
        (
            "unit/models/test_foreign_code.py::test_model_with_python_code_is_rejected",
            "unit/models/test_foreign_code.py::test_tokenizer_with_python_code_is_rejected",
        ),
    ),
    Fault(
        "F33, S2",
        "remote data workers without certificate or token; wrong token or certificate",
        "2 (wrong token: 3)",
        "-",
        "rejected before data are sent",
        "-",
        (
            "unit/extensions/remote/test_remote_recipes.py::test_producers_on_other_hosts_require_encryption",
            "unit/extensions/remote/test_producers.py::test_remote_producers_require_certificate_and_token",
            "unit/extensions/remote/test_producers.py::test_wrong_token_is_rejected",
            "unit/extensions/remote/test_producers.py::test_unknown_certificate_is_rejected",
        ),
    ),
    Fault(
        "S6",
        "invalid requests to remote data workers, other versions, impossible sizes",
        "-",
        "-",
        "rejected with a reason",
        "memory",
        (
            "unit/extensions/remote/test_producers.py::test_malformed_request_is_rejected",
            "unit/extensions/remote/test_producers.py::test_request_outside_plan_is_rejected",
        ),
    ),
    Fault(
        "S7",
        "remote data worker with an invalid response",
        "-",
        "-",
        "error names it; the next one is used",
        "batch",
        (
            "unit/extensions/remote/test_producers.py"
            "::test_malformed_response_is_reported_and_retried_elsewhere",
        ),
    ),
    Fault(
        "S5",
        "Hub ids that are misspelled paths",
        "2",
        "-",
        "distinguished; `revision` pins a commit",
        "-",
        ("unit/data/test_sources.py::test_hub_ids_are_distinguished_from_paths",),
    ),
    # Processes beside a run
    Fault(
        "P1",
        "stream reader: stopped, killed; clients without the secret",
        "3",
        "-",
        "error names the process after `data.timeout_s`; no response without the secret",
        "-",
        (
            f"{READER}test_killed_or_stopped_reader_is_reported",
            f"{READER}test_reader_rejects_wrong_secret",
        ),
    ),
    Fault(
        "P2",
        "errors in the data of a stream",
        "3",
        "-",
        "reported on every rank",
        "-",
        (f"{READER}test_data_error_is_reported_to_every_rank",),
    ),
    Fault(
        "P3",
        "remote data workers that leave, are killed or join; registry that stops",
        "-",
        "-",
        "the list is updated; the run continues without the registry",
        "every batch",
        (
            f"{REGISTRY}test_producers_can_be_added_and_removed",
            f"{REGISTRY}test_run_continues_without_registry",
        ),
    ),
    Fault(
        "P3",
        "missing registry; remote data workers with other data; invalid reports",
        "3",
        "-",
        "error names the key; rejected",
        "-",
        (
            f"{REGISTRY}test_missing_registry_is_reported",
            f"{REGISTRY}test_producers_of_different_data_are_not_requested",
            f"{REGISTRY}test_registry_requires_token_and_valid_reports",
        ),
    ),
    Fault(
        "P4",
        "remote planning: other recipes, invalid responses and requests",
        "3",
        "-",
        "rejected, error names the key",
        "-",
        (
            f"{PLANNED}test_different_training_settings_are_rejected",
            f"{PLANNED}test_malformed_plan_is_rejected",
            f"{PLANNED}test_malformed_plan_request_is_rejected",
        ),
    ),
    Fault(
        "P5",
        "background planner: killed, stopped, failing, 1 MB steps",
        "0",
        "-",
        "no step waits for it",
        "steps are planned synchronously",
        (
            f"{STEPS}test_killed_process_is_named",
            f"{PLANNING}test_a_step_that_cannot_be_planned_is_told",
            f"{STEPS}test_stopped_process_blocks_no_caller",
        ),
    ),
    Fault(
        "P5",
        "background planner that dies once or always, without a free core",
        "0",
        "-",
        "restarted after a pause; disabled after several failures, with a message",
        "-",
        (
            f"{STEPS}test_process_restarts_after_a_pause",
            f"{STEPS}test_process_that_always_exits_is_lost",
            f"{BESIDE}test_process_without_cores_is_replaced",
        ),
    ),
    Fault(
        "P6",
        "one of three Ray workers is killed, one joins",
        "0",
        "done",
        "Ray restarts it; all are used; none remains at the end",
        "losses and last checkpoint, bitwise",
        (f"{RAY}test_one_of_three_is_killed_and_one_is_added",),
        each=2,
    ),
    # Modules on ranks of their own
    Fault(
        "M1",
        "disaggregated encoder, LLM, generator: killed, stopped, hung; manual restart",
        "6, then 0",
        "failed, then done",
        "other ranks exit within `parallel.timeout_s` and name rank and process",
        "losses, every step once, last checkpoint, bitwise",
        (f"{UNITS}test_a_unit_is_lost_and_the_same_command_goes_on",),
    ),
    Fault(
        "M2",
        "the same under torchrun --max-restarts",
        "0",
        "done",
        "torchrun restarts all ranks",
        "losses, every step once, last checkpoint, bitwise",
        (f"{UNITS}test_torchrun_restarts_all_units",),
    ),
    Fault(
        "M3",
        "the LLM is stopped during a save",
        "6",
        "failed",
        "detected by its heartbeat, although saves may take half an hour",
        "-",
        (f"{UNITS}test_a_unit_that_is_stopped_in_a_save_is_missed_soon",),
    ),
    Fault(
        "M4",
        "loss of a node with an encoder replica and its launcher, --nnodes 1:2",
        "0",
        "done",
        "continues with the remaining replicas",
        "bitwise equal to a run with these sizes; losses within 1e-5",
        (f"{UNITS}test_what_is_left_goes_on_when_a_node_of_the_encoder_is_lost",),
    ),
    # Schedulers
    Fault(
        "Q1",
        "Slurm signal before the time limit of a two-node job",
        "75, then 0",
        "preempted, then done",
        "saved; Slurm requeues the job",
        "losses, every step once, last checkpoint, bitwise",
        (f"{SLURM}test_a_preempted_job_is_queued_again_and_ends_with_the_same_bits",),
    ),
    # Exports
    Fault(
        "E1",
        "SIGKILL of an export, also while it replaces another",
        "-9",
        "-",
        "incomplete export is not visible; the next export removes it",
        "previous export",
        (
            f"{EXPORT}test_killed_export_is_removed_by_next_export",
            f"{EXPORT}test_killed_replacement_preserves_old_export",
        ),
    ),
    Fault(
        "E2",
        "disks too small for an export: five sizes, two models",
        "4",
        "-",
        "error names file and reason; nothing remains",
        "export with free space",
        (f"{EXPORT}test_full_disk_leaves_no_export",),
        each=5,
    ),
    Fault(
        "E3",
        "export: existing name, no checkpoint, unsupported model, damage",
        "2 or 4",
        "-",
        "error; nothing remains",
        "existing files",
        (
            f"{EXPORT}test_export_script_accepts_run_and_reports_errors",
            f"{EXPORT}test_failed_export_leaves_no_files",
            f"{EXPORT}test_damaged_and_older_checkpoints_are_reported",
        ),
    ),
    Fault(
        "E4",
        "unreachable or rejecting Hugging Face Hub",
        "2",
        "-",
        "error names repository, reason and HF_TOKEN",
        "local export",
        (f"{EXPORT}test_rejected_upload_preserves_export",),
        each=2,
    ),
    # Untrusted files and requests, limited systems
    Fault(
        "N1",
        "uploaded manifest with the path `../../x` or `/abs`",
        '0 with "auto", 4 if named',
        "-",
        "rejected before a file is written",
        "files outside the run directory",
        (f"{COPIES}test_fetch_of_unsafe_name_writes_nothing",),
    ),
    Fault(
        "N1",
        "manifests and indexes with wrong types or unlisted names",
        "4",
        "-",
        "damaged; the previous checkpoint is used",
        "-",
        (
            f"{DAMAGE}test_manifest_with_wrong_entry_is_rejected",
            f"{DAMAGE}test_manifest_with_unsafe_name_is_rejected",
            f"{DAMAGE}test_index_naming_unlisted_file_is_rejected",
        ),
    ),
    Fault(
        "N2",
        "SIGTERM during indexing, or while weights or tokenizer are loaded",
        "75",
        "preempted",
        "exits within seconds; nothing to save",
        "-",
        (f"{EARLY}test_early_signal_ends_blocked_start",),
    ),
    Fault(
        "N2",
        "SIGTERM in blocking C code, in a collective, and with indexing processes",
        "75",
        "preempted",
        "exits within ten seconds, with its workers",
        "-",
        (
            f"{EARLY}test_early_signal_ends_blocked_c_code",
            f"{EARLY}test_early_signal_ends_waiting_peers",
            f"{EARLY}test_early_signal_ends_measuring_workers",
        ),
    ),
    Fault(
        "N3",
        "store that is full when the manifest is written; failed commit",
        "0",
        "-",
        "no manifest remains; upload is repeated",
        "-",
        (
            f"{COPIES}test_full_disk_leaves_no_manifest",
            f"{COPIES}test_failed_commit_removes_incomplete_manifest",
        ),
    ),
    Fault(
        "N3",
        "upload with a damaged manifest or a short file, at the start",
        "0",
        "-",
        "upload is repeated",
        "-",
        (f"{COPIES}test_damaged_upload_is_repeated_at_start",),
    ),
    Fault(
        "N4",
        "compiled code and other pickles in a run directory",
        "0",
        "-",
        "not read; compiled code is in the user cache directory",
        "loss",
        ("distributed/test_train_features.py::test_compiled_code_gives_the_same_loss_and_is_kept",),
    ),
    Fault(
        "N5",
        "/dev/shm of 64 kB",
        "3",
        "failed",
        "error names /dev/shm and --shm-size",
        "-",
        (f"{LIMITED}test_small_shared_memory_warns_then_ends_run",),
    ),
    Fault(
        "N5, N16",
        "read-only /dev/shm; 64 open files; TMPDIR above 100 bytes",
        "2",
        "not written",
        "error names limit and fix before the start",
        "-",
        (f"{LIMITED}test_unusable_system_is_rejected_before_start",),
    ),
    Fault(
        "N6",
        "registry reports: 10^7 workers, invalid forms, control characters, false addresses",
        "0",
        "-",
        "rejected; registered workers remain",
        "-",
        (
            f"{REGISTRY}test_large_report_does_not_interrupt_run",
            f"{REGISTRY}test_registry_rejects_malformed_report",
            f"{REGISTRY}test_unknown_addresses_do_not_displace_producers",
        ),
    ),
    Fault(
        "N7",
        "requests of hundreds of MB without a token",
        "-",
        "-",
        "connection is closed",
        "-",
        (f"{CONNECTIONS}test_large_request_without_token_is_not_stored",),
    ),
    Fault(
        "N8",
        "clients that do not read responses",
        "-",
        "-",
        "connections are closed; slots become free",
        "-",
        (f"{CONNECTIONS}test_clients_that_do_not_read_lose_their_slots",),
    ),
    Fault(
        "N9",
        "remote data worker responses with wrong dtypes, shapes, ranges or fields",
        "next worker",
        "-",
        "error names field and worker; worker is excluded",
        "-",
        (
            f"{ANSWERS}test_invalid_value_is_rejected_with_name",
            f"{ANSWERS}test_invalid_tensor_is_rejected_with_name",
            f"{ANSWERS}test_out_of_range_value_is_rejected_with_name",
            f"{ANSWERS}test_duplicate_missing_and_unknown_parts_are_rejected",
            f"{ANSWERS}test_endless_response_is_rejected_early",
            f"{PLANNED}test_wrong_plan_is_rejected",
        ),
    ),
    Fault(
        "N9",
        "train.py with one wrong and one correct remote data worker; with only the wrong one",
        "0; 3",
        "done; failed",
        "error names the wrong worker",
        "losses",
        ("distributed/test_train_producers.py::test_wrong_producer_does_not_change_losses",),
    ),
    Fault(
        "N10",
        "Energon files: unbounded expansion, paths outside the dataset",
        "3",
        "-",
        "error names the file",
        "-",
        (
            f"{ENERGON}test_hostile_split_is_rejected",
            f"{ENERGON}test_hostile_description_is_rejected",
            f"{ENERGON}test_random_values_give_data_error_or_source",
        ),
    ),
    Fault(
        "N11",
        "wrong values in [model.*.config] and processors",
        "2",
        "-",
        "before initialization; error names key and reason",
        "-",
        (
            f"{VALUES}test_llm_config_wrong_value_names_key",
            f"{VALUES}test_encoder_config_wrong_value_names_key",
            f"{VALUES}test_processor_wrong_value_is_config_error",
        ),
    ),
    Fault(
        "N11",
        "damaged config, processor and tokenizer files and chat templates",
        "2",
        "-",
        "error names the file",
        "-",
        (
            f"{DAMAGED}test_damaged_config_file_is_reported",
            f"{DAMAGED}test_damaged_tokenizer_file_is_reported",
            f"{DAMAGED}test_invalid_chat_template_is_config_error",
        ),
    ),
    Fault(
        "N12",
        "damaged weight index; files outside or missing",
        "4",
        "-",
        "error names the index",
        "-",
        (f"{DAMAGED}test_damaged_weight_index_is_reported",),
    ),
    Fault(
        "N13",
        "checkpoint of other versions of torch, transformers or Pillow",
        "0",
        "-",
        "warning with both versions",
        "-",
        (f"{SAVED}test_resume_with_different_version_is_logged",),
    ),
    Fault(
        "N14",
        "chat templates without end or with excessive memory use",
        "3",
        "-",
        "corrupt samples, then error names the template",
        "-",
        (
            f"{TEMPLATES}test_template_beyond_limits_is_corrupt",
            f"{TEMPLATES}test_template_that_never_ends_stops_run",
        ),
    ),
    Fault(
        "N14",
        "tokenizer normalizers that multiply text",
        "2",
        "-",
        "error names `model.tokenizer`",
        "-",
        ("unit/data/test_tokenizer.py::test_growing_normalizer_is_rejected",),
    ),
    Fault(
        "N15",
        "SIGKILL of a process with a local Ray cluster",
        "-9",
        "-",
        "no process remains; ports on loopback only",
        "-",
        (f"{RAY}test_local_cluster_is_private_and_ends_with_its_process",),
    ),
    Fault(
        "N17",
        "report of a run directory with scripts, links, pipes, files outside, wrong types",
        "0",
        "-",
        "omitted; skipped values are listed",
        "-",
        (
            f"{PAGES}test_report_runs_no_script_of_files",
            f"{PAGES}test_report_includes_no_outside_file",
            f"{PAGES}test_report_follows_no_outside_link",
            f"{PAGES}test_report_skips_values_of_wrong_type",
        ),
    ),
    Fault(
        "N18",
        "files that decompress to 50 times their size; JSON members above 64 MiB; 16 MiB of "
        "image metadata",
        "3, or corrupt",
        "-",
        "error names limit and file",
        "-",
        (
            f"{TEXTS}test_decompression_stops_at_limit",
            "unit/data/test_torn_tars.py::test_large_text_member_is_corrupt",
            "unit/data/test_images.py::test_images_with_huge_headers_are_corrupt",
        ),
    ),
    Fault(
        "N20",
        "decompressed copy: truncated, replaced, or without a record",
        "0",
        "-",
        "decompressed again, with a warning",
        "all samples",
        (f"{TEXTS}test_damaged_decompressed_copy_is_replaced",),
    ),
    Fault(
        "N22",
        "`checkpoint.remote_dir`: memory://, another host, a missing slash",
        "2",
        "not written",
        "error names key, value and fix",
        "-",
        ("unit/extensions/remote/test_remote_recipes.py::test_upload_to_unusable_url_is_rejected",),
    ),
]

REFUSED = [
    Refused(
        "R11",
        "operating system memory limit on one rank",
        "threads of torch and gloo end the process without an exception; other ranks exit with "
        "code 6 after `parallel.timeout_s`",
    ),
    Refused(
        "S8",
        "the torch store listens on all interfaces, also with MASTER_ADDR=127.0.0.1",
        "torch has no setting for it; run in a private network (SECURITY.md)",
    ),
    Refused(
        "S9",
        "ranks send pickled objects to each other through torch",
        "ranks trust each other; files are never unpickled (SECURITY.md)",
    ),
    Refused(
        "S10",
        "files have mode 0644; W&B receives the recipe with its paths",
        "the umask sets the mode; trackers are off by default",
    ),
    Refused(
        "F12",
        "disk that becomes read-only during training",
        "not injected, because open files stay writable; errors are those of a full disk",
    ),
]
"""Known limitations."""
