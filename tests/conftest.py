"""What tests all over the tree share."""

import gc
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import proofs
import pytest
from object_server import ObjectServer
from train_server import TrainServer

ROOT = Path(__file__).parents[1]
CAMPAIGN_S = float(os.environ.get("CAMPAIGN_S", "inf"))
"""Seconds after the begin in which campaigns may start; later ones are skipped. For machines whose
runs are limited in time, whatever their speed."""
BEGIN_S = time.monotonic()


CAMPAIGNS = {
    # Complete runs. test_layouts.py and unit tests of the planners check the same property.
    "test_train.py::test_layouts_give_the_single_process_curve[2]",
    "test_head_to_head_benchmark.py::test_static_plan_uses_stages_of_representative_batch",
    # Larger worlds and further layouts of tests that also run with fewer ranks.
    "test_disaggregated_equality.py::test_modules_apart_equal_one_process[3, all composites]",
    "test_disaggregated_equality.py::test_modules_apart_equal_one_process[3, towers on two]",
    "test_disaggregated_equality.py::test_modules_apart_equal_one_process[4]",
    "test_disaggregated_equality.py::test_modules_apart_equal_one_process[5]",
    "test_generator_equality.py::test_generators_equal_one_process[pp2, more]",
    "test_generator_equality.py::test_generators_equal_one_process[fsdp2]",
    "test_generator_equality.py::test_generators_equal_one_process[fsdp2, balanced, more]",
    "test_generator_equality.py::test_generators_equal_one_process[replicate2, balanced]",
    "test_generator_equality.py::test_generators_equal_one_process[hsdp 2x2, balanced]",
    "test_generator_equality.py::test_generators_equal_one_process[fsdp2 x tp2, balanced]",
    "test_generator_equality.py::test_generators_equal_one_process[pp2 x fsdp2]",
    "test_generator_equality.py::test_generators_equal_one_process[pp2 x tp2]",
    "test_schedule_equality.py::test_schedules_equal_single_process[pp2]",
    "test_schedule_equality.py::test_schedules_equal_single_process[pp4]",
    "test_schedule_equality.py::test_schedules_equal_single_process[pp2 x tp2]",
    "test_schedule_equality.py::test_schedules_equal_single_process[pp2 x fsdp2]",
    "test_searched_equality.py::test_searched_plans_equal_the_single_process[pp4 and pp2 x fsdp2]",
    # Two composites stand for the others: with taps into the LLM, with two towers and experts.
    *(
        f"test_searched_equality.py::test_so_do_those_of_composites[{name}]"
        for name in (
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen2_5_omni_thinker",
            "voxtral",
            "qwen2_audio",
            "audioflamingo3",
        )
    ),
    "test_train.py::test_layouts_give_the_single_process_curve[2 more]",
    "test_train.py::test_layouts_give_the_single_process_curve[4]",
    "test_tuned_equality.py::test_tuned_plans_equal_the_single_process[4]",
    "test_pipeline_model.py",
    # Every causal LM and image encoder of transformers.
    "test_unlisted_encoders.py::test_survey_of_image_encoders_matches_documentation",
    "test_unlisted.py::test_survey_of_causal_lms_matches_documentation",
    "test_train.py::test_resume_continues_with_the_same_bits[pipeline-workers1-changes1]",
    "test_train.py::test_resume_continues_with_the_same_bits[llm.context-workers2-changes2]",
    # Whole runs of what the equality tests above them compare step by step.
    "test_train_disaggregated.py",
    "test_train_generation.py",
    "test_step_overlap.py::test_planning_ahead_keeps_losses_and_weights",
    "test_train_producers.py::test_wrong_producer_does_not_change_losses",
    "test_train_reordering.py",
    "test_train_searched.py",
    "test_shared_plans.py::test_where_a_plan_is_made_changes_no_bit[separated]",
    "test_shared_plans.py::test_where_a_plan_is_made_changes_no_bit[zero_bubble]",
    "test_train_models.py::test_balanced_stream_of_two_ranks_resumes_exactly",
    # Pictures at their real sizes.
    *(
        f"test_tiles.py::test_tiles_of_published_size_match_hugging_face[{source}-{family}]"
        for source in ("tuxpaint_stamps", "gimp_help")
        for family in (
            "internvl",
            "idefics3",
            "smolvlm",
            "gemma3",
            "llava_next",
            "llava_onevision",
        )
    ),
    # The emulated device on defects that it must find; one run without any stays.
    "test_cuda_emulation.py::test_the_emulated_device_finds_what_it_is_for",
    "test_cuda_emulation.py::test_defects_are_found[look_at_device-quickstart]",
    "test_cuda_emulation.py::test_defects_are_found[timed_late-quickstart]",
    # Faults on real processes, which wait for time limits.
    "test_data_workers.py::test_a_process_with_idle_workers_exits_at_once",
    "test_data_workers.py::test_a_process_with_stopped_workers_exits_too",
    "test_data_workers.py::test_workers_end_when_their_process_is_killed",
    "test_disaggregated_faults.py",
    "test_faults.py::test_torchrun_restarts_a_killed_rank_and_ends_with_the_same_bits",
    "test_hung_data.py",
    "test_train_faults.py::test_kill_while_saving_in_the_background_loses_only_that_save",
    "test_train_faults.py::test_sigterm_to_one_rank_stops_all_at_the_same_step",
    "test_train_faults.py::test_plain_python_trains_and_exits_with_0",
    "test_train_faults.py::test_non_finite_numbers_stop_all_and_leave_a_good_checkpoint",
    "test_stores.py::test_a_run_equals_that_on_local_files_and_no_secret_is_written",
    "test_uploads.py::test_a_damaged_copy_is_skipped_and_only_damaged_ones_stop_the_start",
    "test_step_process.py::test_exit_does_not_wait_for_process",
    "test_peer_watch.py::test_a_process_whose_main_thread_waits_is_ended[True-True-step]",
    "test_train_faults.py::test_sigterm_to_torchrun_saves_and_the_rerun_ends_with_the_same_bits",
    "test_train_faults.py::test_too_many_corrupt_samples_stop_all_ranks",
    "test_kill_while_saving.py::test_thirty_kills_leave_only_whole_checkpoints",
    "test_train_faults.py::test_torchrun_recovers_from_five_kills_with_the_same_bits",
    # Whole programs that are slowed until they would be silent.
    "test_silence.py::test_a_whole_run_and_an_export_say_what_takes_long",
    "test_silence.py::test_planning_a_cluster_says_what_takes_long",
    *(
        f"test_silence.py::test_programs_say_at_once_that_they_import[scripts/{name}.py]"
        for name in (
            "text_baseline",
            "calibrate",
            "evaluate",
            "inspect_data",
            "index_data",
            "simulate",
            "prepare_data",
            "gpu_check",
            "export",
            "generate",
        )
    ),
    # Benchmarks that time real ranks.
    "test_searched_pipeline_benchmark.py::test_searched_pipeline_writes_rows_with_equal_gradients",
    "test_cost_accuracy_benchmark.py::test_cost_benchmark_writes_rows_of_both_rank_counts",
    "test_paper_recipes.py::test_strong_scaling_follows_from_one_cell",
    # Benchmarks that search and simulate for more than ten seconds.
    "test_disttrain_figures.py::test_reordering_and_frozen_modules_have_rows",
    "test_plain_alternative_benchmark.py::test_manual_pipelines_fit_and_match_forecasts",
    # Long equality and whole runs on several ranks; shorter ones of the same kind run always.
    "test_launched_equality.py::test_launched_pieces_equal_one_process[4]",
    "test_compiled_tensor_parallel.py::test_compiled_layers_of_changing_lengths_equal_the_whole_model",
    "test_decode_once.py::test_replicas_decode_each_image_once[2 ranks]",
    *(
        f"test_train_float8.py::test_layouts_round_as_one_process_does[{name}]"
        for name in ("compiled", "tensor", "context", "one_scale")
    ),
    "test_frozen_llm.py",
    "test_layouts.py::test_norms_of_parts_of_rows_are_found",
    "test_preflight.py::test_two_ranks_compare_themselves[1-20.0]",
    "test_rank_trials.py::test_two_ranks_run_modules_whole_and_in_halves",
    "test_sliced_messages.py",
    "test_train.py::test_checkpoint_of_one_layout_continues_in_another",
    "test_train_features.py::test_bfloat16_stays_close_to_float32_on_one_rank_and_two",
    "test_train_features.py::test_deterministic_runs_give_the_same_bits",
    # Whole runs of what unit tests or another case of the same test check.
    "test_bad_starts.py::test_train_ends_with_2_and_no_traceback[WORLD_SIZE = two]",
    "test_bad_starts.py::test_train_ends_with_2_and_no_traceback[no MASTER_ADDR]",
    "test_train_features.py::test_activation_checkpointing_changes_no_loss[selective]",
    "test_train_features.py::test_frozen_modules_keep_their_weights[llm]",
    "test_train_features.py::test_schedules[constant-expected0]",
    "test_train_features.py::test_schedules[cosine-expected2]",
    "test_train_features.py::test_unreachable_wandb_does_not_stop_training",
    "test_train_models.py::test_the_export_has_our_validation_loss[llava]",
    *(
        f"test_train_models.py::test_tiles_give_the_same_losses_on_two_ranks[{name}]"
        for name in ("internvl, fsdp", "internvl, balanced", "onevision, balanced")
    ),
    "test_update_memory.py::test_the_update_needs_what_planners_think[4]",
    "test_weight_files.py::test_every_layout_loads_and_saves_the_same_adapters",
    "test_train_float8.py::test_rounding_shows_and_the_loss_falls_all_the_same",
    "test_train_pipeline.py::test_colocated_encoders_change_no_number",
    "test_train_producers.py::test_two_ranks_train_on_what_producers_prepare_and_plan",
    "test_shared_plans.py::test_where_a_plan_is_made_changes_no_bit[1f1b]",
    "test_train.py::test_resume_continues_with_the_same_bits[shard-workers3-changes3]",
    "test_uploads.py::test_a_store_that_takes_nothing_more_is_told_and_training_goes_on[full]",
    # Planners on whole clusters.
    *(
        f"test_size_search.py::test_search_is_never_slower_than_brute_force[{seed}]"
        for seed in (1, 2, 3)
    ),
    *(
        f"test_orchestrate.py::test_the_optimum_and_the_next_best_equal_those_of_all_plans[{seed}]"
        for seed in (0, 1)
    ),
    # Benchmarks in small.
    "test_head_to_head_benchmark.py::test_all_methods_run_the_same_batch",
    "test_async_tensor_benchmark.py::test_async_benchmark_writes_rows_and_plot",
    "test_balanced_encoders_benchmark.py::test_planning_rows_show_even_work",
    "test_benchmarks.py::test_single_device_writes_rows_of_schema",
    "test_bubble_scheduling_benchmark.py::"
    "test_memory_includes_activations_and_marks_oversized_plans",
    "test_disttrain_figures.py",
    "test_pipeline_benchmark.py::test_all_pipeline_cases_write_rows",
    "test_pipeweaver_benchmark.py::test_figure_11_compares_memory_of_first_rank",
    "test_pipeweaver_benchmark.py::test_grid_rows_are_mfu_fractions",
    "test_pipeweaver_benchmark.py::test_dynamic_iterations_are_fastest_with_torchmm",
    "test_pipeweaver_benchmark.py::test_sizes_compare_best_with_worst_order",
    "test_memory_benchmark.py::test_memory_settings_match_predictions[state_rows]",
    "test_memory_benchmark.py::test_chunked_loss_memory_is_one_chunk[torch.bfloat16]",
    "test_loader_scale_benchmark.py::test_each_scale_case_has_rows[billion]",
    "test_pipeweaver_benchmark.py::test_large_models_have_published_mfu_once",
    "test_pipeweaver_benchmark.py::test_replicas_of_large_models_have_equal_work",
    "test_preprocessing_benchmark.py::test_sending_time_is_reported_for_both_transports",
    # Wrong config values and damaged files; fewer draws run always.
    "test_broken.py::test_wrong_config_values_build_or_name_the_key[2-3000]",
    "test_broken.py::test_damaged_files_load_or_are_named[2-2000]",
    # Random recipes with a mistake put in; others with one run always.
    "test_fuzz.py::test_what_is_spoiled_is_found[gradient-gradient of]",
    "test_fuzz.py::test_what_is_spoiled_is_found[averages-average: rank 0]",
    "test_fuzz.py::test_composites_that_hear_are_judged[types0--None]",
    "test_fuzz.py::test_composites_that_hear_are_judged[types1-rows-loss]",
    "test_fuzz.py::test_composites_that_hear_are_judged[types2--None]",
    # Long cases of properties that a shorter case or a unit test holds always.
    "test_cuda_emulation.py::test_one_gpu_parts_run_without_errors[trace]",
    "test_cuda_emulation.py::test_defects_are_found[early_wait-quickstart]",
    "test_colocated_equality.py::test_what_other_mirrors_are_handed_is_noticed",
    "test_disaggregated_equality.py::test_modules_apart_equal_one_process[3]",
    "test_generator_equality.py::test_generators_equal_one_process[fsdp2, balanced]",
    *(
        f"test_gradient_reduction.py::test_gradients_reduced_per_microbatch_equal_single_process[{c}]"
        for c in ("4-compared1", "4-compared2")
    ),
    "test_launched_equality.py::test_launched_pieces_equal_one_process[2]",
    "test_mixed_precision.py::test_one_rank_equals_fsdp_on_one_rank",
    "test_searched_modalities.py",
    "test_silence.py::test_programs_say_at_once_that_they_import[train.py]",
    "test_searched_equality.py::test_so_do_those_of_composites[qwen3_omni_moe_thinker]",
    "test_train_float8.py::test_layouts_round_as_one_process_does[slices]",
    "test_train.py::test_ranks_that_share_rows_write_the_records_of_one",
    "test_train_models.py::test_the_export_has_our_validation_loss[pair]",
    "test_train_models.py::test_ranks_without_images_join_those_with[ddp]",
    "test_train_pipeline.py::test_averaged_weights_are_exported_and_validated",
    "test_video_equality.py::test_searched_plans_of_clips_equal_the_single_process",
    "test_early_stop.py::test_early_signal_ends_blocked_c_code",
    "test_limited_systems.py::test_small_shared_memory_warns_then_ends_run",
    "test_run_directory.py::test_a_disk_too_small_for_the_export",
    "test_run_directory.py::test_a_disk_that_fills_up_while_training",
    "test_fuzz.py::test_what_is_spoiled_is_found[-]",
    "test_train_faults.py::test_a_finished_run_says_so_and_a_changed_model_is_refused",
    "test_train_faults.py::test_changed_data_are_refused_or_gone_on_with_as_the_recipe_says",
    "test_compile_choice.py::test_inductor_llm_equals_eager_in_float32[none]",
    "test_compile_choice.py::test_inductor_llm_equals_eager_in_float32[full]",
    "test_compile_choice.py::test_inductor_qwen_encoder_equals_eager_in_float32[none]",
    "test_recompute_choice.py::test_what_a_compiled_layer_keeps_is_freed_where_it_is_run_again",
    "test_compiled_costs.py::test_compiled_layer_traffic_matches_inductor[llama]",
    "test_compiled_costs.py::test_compiled_layer_traffic_matches_inductor[qwen3]",
    *(
        f"test_orchestration.py::test_sizes_that_will_be_planned_are_not_held_against_the_ranks[{c}]"
        for c in ("6-changes1", "6-changes2")
    ),
    *(
        f"test_video_model.py::test_videos_match_hugging_face_loss_and_gradients[{name}]"
        for name in ("qwen2_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_5_moe", "glm4v_moe", "glm46v")
    ),
    *(
        f"test_remote_sources.py::test_remote_source_has_same_samples[{name}]"
        for name in ("json", "csv", "gz", "described")
    ),
    *(
        f"test_llm.py::test_layers_compile_as_one_graph[{name}]"
        for name in ("gemma2", "lfm2", "qwen3_moe", "deepseek_v3")
    ),
    "test_connections.py::test_large_request_without_token_is_not_stored[ticket]",
    "test_peer_watch.py::test_a_process_whose_main_thread_waits_is_ended[False-False-step]",
    *(
        f"test_train_float8.py::test_layouts_round_as_one_process_does[{name}]"
        for name in ("sharded", "pipeline", "recomputed")
    ),
    "test_run_directory.py::test_a_disk_too_small_for_a_checkpoint",
    "test_generator_tensor_parallel.py",
    "test_async_tensor_parallel.py::test_overlapped_linears_of_two_ranks_equal_whole_ones",
    "test_p2p.py::test_what_the_plan_does_not_say_is_not_sent",
    *(
        f"test_stores.py::test_faults_that_last_end_with_code_3_and_name_address_and_remedy[{name}]"
        for name in ("away", "wrong bytes")
    ),
    "test_compile_choice.py::test_compiled_selective_recomputation_repeats_no_product",
    "test_train.py::test_experts_train_over_ranks_and_continue_on_one",
    "test_train_published.py::test_llavas_two_stages_train_on_llavas_json",
    "test_decode_once.py::test_what_only_one_rank_knows_to_be_torn_is_found",
    "test_generator_equality.py::test_wrong_contexts_change_the_loss",
    "test_optimizer_layouts.py::test_all_layouts_give_the_same_bits",
    "test_p2p.py::test_messages_arrive_in_order_whatever_their_size",
    "test_train_faults.py::test_a_damaged_checkpoint_is_refused_by_name",
    "test_train_faults.py::"
    "test_a_source_that_gives_nothing_ends_the_run_before_weights_are_read[validation]",
    "test_uploads.py::test_what_is_wrong_with_the_store_at_the_start_is_named[away]",
    "test_tuned_equality.py::test_tuned_plans_equal_the_single_process[2]",
    "test_train_features.py::test_compiled_layers_have_two_graphs_of_a_kind",
    "test_generate_script.py::test_images_are_generated_from_prompts[videos-gif]",
    *(
        f"test_compilation.py::test_llms_have_few_graphs_whatever_lengths_come[{name}]"
        for name in ("gemma3_text", "smollm3", "llama")
    ),
    "test_step_overlap.py::test_step_counts_and_plans_before_it_waits",
    *(
        f"test_model_stages.py::test_random_cuts_and_orders_equal_the_whole_model[{kinds}-{freeze}]"
        for kinds in ("kinds0", "kinds1", "kinds2", "kinds3")
        for freeze in ("freeze1", "freeze2")
    ),
    "test_emoji_scenes.py::test_scene_caption_matches_objects_and_positions[train]",
}
"""Tests and files marked `campaign`: they run with `./scripts/test.sh --all` only, as CI does."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--proofs FILE`: see `proofs`; `--outcomes FILE`: see `faults/write_page.py`; `--clients
    FILE`: see `scripts/client_table.py`."""
    parser.addoption("--proofs", type=Path, help="write what passing tests prove of model families")
    parser.addoption("--outcomes", type=Path, help="write how each test ended")
    parser.addoption("--clients", type=Path, help="write what other programs did with exports")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, object]:
    """Notes what has been proved."""
    report = yield
    file = item.config.getoption("--proofs")
    if file is not None and report.when == "call" and report.passed:
        proofs.note(item, file)
    outcomes = item.config.getoption("--outcomes")
    if outcomes is not None and (report.when == "call" or not report.passed):
        with outcomes.open("a") as out:
            line = {"test": item.nodeid, "outcome": report.outcome, "s": round(report.duration, 3)}
            out.write(json.dumps(line) + "\n")
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Lets pytest-xdist start files in the order below, not those with most tests first."""
    gc.disable()  # hundreds of thousands of objects are imported, none of them garbage
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets no campaign begin that there is no time for."""
    if time.monotonic() - BEGIN_S > CAMPAIGN_S and item.get_closest_marker("campaign"):
        pytest.skip(f"a campaign, {CAMPAIGN_S:.0f} s after the begin (CAMPAIGN_S)")


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end, short ones keep all workers busy."""
    found = set()
    for item in items:
        if names := CAMPAIGNS & {item.path.name, f"{item.path.name}::{item.name}"}:
            item.add_marker("campaign")
            found |= names
    files = {item.path.name for item in items}
    gone = {name for name in CAMPAIGNS - found if name.partition("::")[0] in files}
    if gone and not any("::" in argument for argument in config.args):  # whole files
        raise pytest.UsageError(f"CAMPAIGNS names tests that do not exist: {sorted(gone)}")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """From here on, collecting garbage costs what tests make, not what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _torchmm_logger() -> Iterator[None]:
    """Programs that a test runs in its own process turn the logger to a console; the next test
    finds it as it was."""
    logger = logging.getLogger("torchmm")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory with real pictures with captions and their tokenizers (made by scripts/test.sh)."""
    directory = ROOT / "data"
    for name in ("tuxpaint_stamps", "emoji_scenes"):
        if not (directory / name / "train").is_dir():
            pytest.skip(f"no real data here; run: python scripts/prepare_data.py {name}")
    return directory


@pytest.fixture(scope="session")
def train_server() -> Iterator[TrainServer]:
    """Runs train.py in forks of one warm process."""
    with TrainServer() as server:
        yield server


@pytest.fixture(scope="session")
def _objects() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def object_server(_objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """An S3 server on this machine without faults, and the environment that finds it."""
    _objects.reset()
    for name, value in _objects.environment.items():
        monkeypatch.setenv(name, value)
    return _objects


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A small disk that is mounted with the given options, or remounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = False

    def mount(options: str) -> Path:
        nonlocal mounted
        how = ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        if subprocess.run(["mount", *how, str(path)], check=False, capture_output=True).returncode:
            pytest.skip("cannot mount a tmpfs here")
        mounted = True
        return path

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
