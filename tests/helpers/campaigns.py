"""Tests that run only with `./scripts/test.sh --all` and in CI."""

CAMPAIGNS = {
    # Complete runs. test_layouts.py and unit tests of the planners check the same property.
    "test_train.py::test_layouts_give_single_process_losses[2]",
    "test_head_to_head_benchmark.py::test_static_plan_uses_stages_of_representative_batch",
    # Larger worlds and further layouts of tests that also run with fewer ranks.
    "test_disaggregated_equality.py::test_disaggregation_equals_one_process[3, all composites]",
    "test_disaggregated_equality.py::test_disaggregation_equals_one_process[3, towers on two]",
    "test_disaggregated_equality.py::test_disaggregation_equals_one_process[4]",
    "test_disaggregated_equality.py::test_disaggregation_equals_one_process[5]",
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
    "test_searched_equality.py::test_searched_plans_equal_single_process[pp4 and pp2 x fsdp2]",
    # Two multimodal models run always: with DeepStack, and with two encoders and experts.
    *(
        f"test_searched_equality.py::test_searched_multimodal_plans_equal_single_process[{name}]"
        for name in (
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen2_5_omni_thinker",
            "voxtral",
            "qwen2_audio",
            "audioflamingo3",
        )
    ),
    "test_train.py::test_layouts_give_single_process_losses[2 more]",
    "test_train.py::test_layouts_give_single_process_losses[4]",
    "test_layer_tuning_equality.py::test_tuned_plans_equal_single_process[4]",
    "test_pipeline_model.py",
    # Every causal LM and image encoder of transformers.
    "test_unregistered_encoders.py::test_survey_of_image_encoders_matches_documentation",
    "test_unregistered_llms.py::test_survey_of_causal_lms_matches_documentation",
    "test_train.py::test_resume_is_bitwise_equal[pipeline-workers1-changes1]",
    "test_train.py::test_resume_is_bitwise_equal[llm.context-workers2-changes2]",
    # Complete runs. Equality tests compare single steps of the same configurations.
    "test_train_disaggregated.py",
    "test_train_generation.py",
    "test_step_overlap.py::test_planning_ahead_keeps_losses_and_weights",
    "test_train_producers.py::test_wrong_producer_does_not_change_losses",
    "test_train_reordering.py",
    "test_train_searched.py",
    "test_shared_plans.py::test_planning_process_keeps_bitwise_results[separated]",
    "test_shared_plans.py::test_planning_process_keeps_bitwise_results[zero_bubble]",
    "test_train_models.py::test_balanced_stream_resumes_exactly",
    # Images at their original sizes.
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
    # Negative controls of the emulated device. One run without defects runs always.
    "test_cuda_emulation.py::test_emulated_device_detects_errors",
    "test_cuda_emulation.py::test_defects_are_detected[read_device_value-quickstart]",
    "test_cuda_emulation.py::test_defects_are_detected[late_timing-quickstart]",
    # Faults of processes, which wait for time limits.
    "test_data_workers.py::test_process_with_idle_workers_exits",
    "test_data_workers.py::test_process_with_stopped_workers_exits",
    "test_data_workers.py::test_workers_exit_with_killed_process",
    "test_disaggregated_faults.py",
    "test_faults.py::test_torchrun_restarts_killed_rank_exactly",
    "test_stalled_workers.py",
    "test_train_faults.py::test_kill_during_async_save_loses_that_save",
    "test_train_faults.py::test_sigterm_to_one_rank_stops_all_together",
    "test_train_faults.py::test_plain_python_trains_and_exits_with_0",
    "test_train_faults.py::test_non_finite_loss_stops_all_ranks",
    "test_stores.py::test_object_store_run_equals_local_run",
    "test_uploads.py::test_damaged_upload_is_skipped_at_start",
    "test_step_process.py::test_exit_does_not_wait_for_process",
    "test_peer_watch.py::test_process_with_blocked_main_thread_is_terminated[True-True-step]",
    "test_train_faults.py::test_sigterm_to_torchrun_saves_and_resumes_exactly",
    "test_train_faults.py::test_too_many_corrupt_samples_stop_all_ranks",
    "test_kill_while_saving.py::test_thirty_kills_leave_complete_checkpoints",
    "test_train_faults.py::test_torchrun_recovers_from_five_kills_exactly",
    # Programs with slowed functions.
    "test_progress_logs.py::test_run_and_export_log_slow_functions",
    "test_progress_logs.py::test_cluster_planning_logs_slow_functions",
    *(
        f"test_progress_logs.py::test_programs_log_imports_at_once[scripts/{name}.py]"
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
    # Benchmarks that measure real ranks.
    "test_searched_pipeline_benchmark.py::test_searched_pipeline_writes_rows_with_equal_gradients",
    "test_cost_accuracy_benchmark.py::test_cost_benchmark_writes_rows_of_both_rank_counts",
    "test_paper_recipes.py::test_strong_scaling_follows_from_one_cell",
    # Benchmarks that search and simulate for more than ten seconds.
    "test_disttrain_figures.py::test_reordering_and_frozen_modules_have_rows",
    "test_plain_alternative_benchmark.py::test_manual_pipelines_fit_and_match_forecasts",
    # Long equality tests and complete runs on several ranks. Shorter ones run always.
    "test_overlap_equality.py::test_launched_kernels_equal_one_process[4]",
    "test_compiled_tensor_parallel.py::test_compiled_layers_equal_unsharded_for_varying_lengths",
    *(
        f"test_train_float8.py::test_float8_layouts_equal_one_process[{name}]"
        for name in ("compiled", "tensor", "context", "one_scale")
    ),
    "test_frozen_llm.py",
    "test_layouts.py::test_local_dora_norms_change_loss",
    "test_preflight.py::test_two_ranks_compare_their_speeds[1-20.0]",
    "test_sliced_messages.py",
    "test_train.py::test_checkpoint_resumes_in_other_layouts",
    "test_train_features.py::test_bfloat16_is_close_to_float32",
    "test_train_features.py::test_deterministic_runs_give_the_same_bits",
    # Complete runs. Unit tests or other cases of the same test check the same property.
    "test_bad_starts.py::test_bad_environment_exits_with_2[WORLD_SIZE = two]",
    "test_bad_starts.py::test_bad_environment_exits_with_2[no MASTER_ADDR]",
    "test_train_features.py::test_activation_checkpointing_keeps_losses[selective]",
    "test_train_features.py::test_frozen_modules_keep_their_weights[llm]",
    "test_train_features.py::test_learning_rate_schedules[constant-expected0]",
    "test_train_features.py::test_learning_rate_schedules[cosine-expected2]",
    "test_train_features.py::test_unreachable_wandb_does_not_stop_training",
    "test_train_models.py::test_export_has_validation_loss_of_run[llava]",
    *(
        f"test_train_models.py::test_tiles_give_same_losses_on_two_ranks[{name}]"
        for name in ("internvl, fsdp", "internvl, balanced", "onevision, balanced")
    ),
    "test_update_memory.py::test_update_memory_matches_prediction[4]",
    "test_weight_files.py::test_layouts_load_and_save_same_adapters",
    "test_train_float8.py::test_float8_changes_losses_within_tolerance",
    "test_train_pipeline.py::test_colocated_run_equals_one_rank",
    "test_train_producers.py::test_two_ranks_train_with_producers",
    "test_shared_plans.py::test_planning_process_keeps_bitwise_results[1f1b]",
    "test_train.py::test_resume_is_bitwise_equal[shard-workers3-changes3]",
    "test_uploads.py::test_rejected_uploads_warn_and_training_continues[full]",
    # Planners on complete clusters.
    *(
        f"test_size_search.py::test_search_is_never_slower_than_brute_force[{seed}]"
        for seed in (1, 2, 3)
    ),
    *(
        f"test_orchestrate.py::test_orchestration_finds_optimum_and_alternatives[{seed}]"
        for seed in (0, 1)
    ),
    # Small benchmarks.
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
    # Wrong config values and damaged files. Fewer random cases run always.
    "test_invalid_models.py::test_wrong_config_values_name_key[2-1000]",
    "test_invalid_models.py::test_damaged_files_are_named[2-700]",
    # Random recipes with an injected defect. Other defects run always.
    "test_fuzz.py::test_judge_detects_defect[gradient-gradient of]",
    "test_fuzz.py::test_judge_detects_defect[averages-average: rank 0]",
    "test_fuzz.py::test_judge_supports_audio_models[types0--None]",
    "test_fuzz.py::test_judge_supports_audio_models[types1-rows-loss]",
    "test_fuzz.py::test_judge_supports_audio_models[types2--None]",
    # Long cases. Shorter cases or unit tests check the same property always.
    "test_cuda_emulation.py::test_one_gpu_parts_run_without_errors[trace]",
    "test_cuda_emulation.py::test_defects_are_detected[early_wait-quickstart]",
    "test_colocated_equality.py::test_wrong_features_of_mirrors_change_loss",
    "test_disaggregated_equality.py::test_disaggregation_equals_one_process[3]",
    "test_generator_equality.py::test_generators_equal_one_process[fsdp2, balanced]",
    *(
        f"test_gradient_reduction.py::test_gradients_reduced_per_microbatch_equal_single_process[{c}]"
        for c in ("4-compared1", "4-compared2")
    ),
    "test_overlap_equality.py::test_launched_kernels_equal_one_process[2]",
    "test_mixed_precision.py::test_one_rank_equals_fsdp_on_one_rank",
    "test_searched_modalities.py",
    "test_progress_logs.py::test_programs_log_imports_at_once[train.py]",
    "test_searched_equality.py::test_searched_multimodal_plans_equal_single_process[qwen3_omni_moe_thinker]",
    "test_train_float8.py::test_float8_layouts_equal_one_process[slices]",
    "test_train.py::test_context_parallel_records_equal_single_process",
    "test_train_models.py::test_export_has_validation_loss_of_run[pair]",
    "test_train_models.py::test_ranks_without_images_train_with_others[ddp]",
    "test_train_pipeline.py::test_averaged_weights_are_exported_and_validated",
    "test_video_equality.py::test_searched_video_plans_equal_single_process",
    # Further layouts of losses, adapters and new tokens. One or two layouts of each run always.
    *(
        f"test_preference_layouts.py::test_preference_metrics_are_equal_in_layouts[{name}]"
        for name in (
            "replicate",
            "tensor",
            "zero bubble",
            "context",
            "dynamic context",
            "balanced images",
            "compiled",
            "disaggregated",
        )
    ),
    *(
        f"test_preference_layouts.py::test_preference_tuning_of_adapters_is_equal_in_layouts[{name}]"
        for name in ("shard", "tensor")
    ),
    "test_preference_layouts.py::test_virtual_stages_have_the_loss_of_pairs",
    "test_preference_layouts.py::test_experts_have_equal_metrics_on_two_ranks",
    "test_preference_layouts.py::test_simpo_is_equal_in_pipeline",
    "test_preference_layouts.py::test_streamed_pairs_start_from_loss_of_reference",
    *(
        f"test_loss_term_layouts.py::test_terms_are_equal_in_layouts[{name}]"
        for name in ("replicate", "shard", "pipeline", "virtual stages", "tensor", "context")
    ),
    *(
        f"test_losses_by_source.py::test_source_losses_are_equal_in_layouts[{name}]"
        for name in ("replicate", "pipeline", "virtual stages", "context")
    ),
    *(
        "test_train_new_tokens.py::test_new_tokens_are_equal_in_layouts"
        f"[tensor and pipeline-adapters{adapters}-{tied}]"
        for adapters, tied in ((0, False), (0, True), (1, False))
    ),
    "test_train_new_tokens.py::test_padded_vocabulary_is_used_first",
    *(
        f"test_train_quantization.py::test_quantized_layouts_equal_one_process[{name}]"
        for name in ("pipeline", "recomputed")
    ),
    *(
        f"test_train_quantization.py::test_checkpoint_resumes_in_other_layout[{name}]"
        for name in ("pipeline", "tensor")
    ),
    "test_dynamic_context.py::test_run_equals_single_process_and_resumes_exactly",
    "test_notebook.py::test_notebook_runs_and_reduces_loss",
    "test_early_stop.py::test_early_signal_ends_blocked_c_code",
    "test_system_limits.py::test_small_shared_memory_warns_then_ends_run",
    "test_run_directory.py::test_disk_too_small_for_export",
    "test_run_directory.py::test_disk_that_fills_during_training",
    "test_fuzz.py::test_judge_detects_defect[-]",
    "test_train_faults.py::test_finished_run_rejects_changed_model",
    "test_train_faults.py::test_changed_data_require_recipe_permission",
    "test_compile_choice.py::test_inductor_llm_matches_eager_in_float32[none]",
    "test_compile_choice.py::test_inductor_llm_matches_eager_in_float32[full]",
    "test_compile_choice.py::test_inductor_qwen_encoder_matches_eager_in_float32[none]",
    "test_recompute_choice.py::test_recomputed_compiled_layers_save_no_tensors",
    "test_compiled_costs.py::test_compiled_layer_traffic_matches_inductor[llama]",
    "test_compiled_costs.py::test_compiled_layer_traffic_matches_inductor[qwen3]",
    *(
        f"test_orchestration.py::test_auto_sizes_skip_world_size_check[{c}]"
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
    "test_orchestration.py::test_unusable_number_of_ranks_is_rejected",
    "test_connections.py::test_large_request_without_token_is_not_stored[ticket]",
    "test_peer_watch.py::test_process_with_blocked_main_thread_is_terminated[False-False-step]",
    *(
        f"test_train_float8.py::test_float8_layouts_equal_one_process[{name}]"
        for name in ("sharded", "pipeline", "recomputed")
    ),
    "test_run_directory.py::test_disk_too_small_for_checkpoint",
    "test_generator_tensor_parallel.py",
    "test_async_tensor_parallel.py::test_overlapped_linears_equal_unsharded_on_two_ranks",
    "test_p2p.py::test_tensors_that_differ_from_plan_are_rejected",
    *(
        f"test_stores.py::test_permanent_store_faults_exit_with_3[{name}]"
        for name in ("away", "wrong bytes")
    ),
    "test_compile_choice.py::test_compiled_selective_recomputation_repeats_no_matmul",
    "test_train.py::test_expert_parallel_checkpoint_resumes_on_one_rank",
    "test_train_published.py::test_llava_stages_train_on_llava_json",
    "test_generator_equality.py::test_wrong_contexts_change_loss",
    "test_optimizer_layouts.py::test_optimizer_layouts_give_same_bits",
    "test_p2p.py::test_messages_of_all_sizes_arrive_in_order",
    "test_train_faults.py::test_damaged_checkpoint_error_names_file",
    "test_train_faults.py::test_unusable_source_fails_before_weights_load[validation]",
    "test_uploads.py::test_store_errors_at_start_are_named[away]",
    "test_layer_tuning_equality.py::test_tuned_plans_equal_single_process[2]",
    "test_train_features.py::test_compiled_layers_have_two_graphs_each",
    "test_generate_script.py::test_images_are_generated_from_prompts[videos-gif]",
    *(
        f"test_compilation.py::test_llms_have_few_graphs_for_all_lengths[{name}]"
        for name in ("gemma3_text", "smollm3", "llama")
    ),
    "test_step_overlap.py::test_step_counts_and_plans_before_it_waits",
    *(
        f"test_model_stages.py::test_random_stages_match_complete_model[{kinds}-{freeze}]"
        for kinds in ("kinds0", "kinds1", "kinds2", "kinds3")
        for freeze in ("freeze1", "freeze2")
    ),
    "test_emoji_scenes.py::test_scene_caption_matches_objects_and_positions[train]",
    # Further cases of slow tests. At least one case of each property runs always.
    *(
        f"test_compile_choice.py::test_compiled_encoder_recomputes_only_with_backward[{case}]"
        for case in ("False-full", "False-auto", "True-selective", "True-full")
    ),
    "test_loader.py::test_resume_is_exact_with_any_workers[best_fit-True]",
    "test_loader.py::test_resume_is_exact_with_any_workers[balanced-False]",
    r"test_encoder_choice.py::test_encoder_sizes_are_the_fastest_combination[tensor = 2\n]",
    *(
        f"test_video_model.py::test_videos_match_hugging_face_loss_and_gradients[{name}]"
        for name in ("qwen3_omni", "qwen3_vl_moe", "glm4v")
    ),
    *(
        f"test_layer_tuning_generators.py::test_tuned_generation_step_stays_within_limit[{case}]"
        for case in ("different sizes-zero_bubble-freeze0", "images and videos-gpipe-freeze1")
    ),
    "test_layer_tuning_generators.py::test_vae_encoding_step_stays_within_limit"
    "[zero_bubble-channels0-4]",
    "test_layer_tuning_generators.py::test_frozen_generator_step_stays_within_limit[freeze1]",
    "test_compiled_memory.py::test_compiled_layer_saves_at_most_planned_bytes[qwen3_5-dtype1]",
    "test_llm.py::test_layers_compile_as_one_graph[gpt_oss]",
    "test_encoders.py::test_packed_layers_compile_as_one_graph[gemma4]",
    "test_size_search.py::test_search_without_pipelines_loses_to_brute_force",
    "test_connections.py::test_large_request_without_token_is_not_stored[action]",
    "test_overlap_choice.py::test_unprofitable_launches_are_not_chosen",
    "test_orchestration.py::test_auto_sizes_skip_world_size_check[6-changes3]",
    "test_emoji_scenes.py::test_held_out_pairs_use_trained_objects",
    "test_plain_alternative_benchmark.py::test_best_plain_plan_is_forecast_of_its_recipe",
    "test_pipeweaver_benchmark.py::test_figure_9a_has_published_range_of_gains",
    "test_bubble_scheduling_benchmark.py::test_two_encoders_have_separate_plans",
    "test_llm_orders.py::test_adjusted_warmups_shorten_some_steps",
    "test_train_quantization.py::test_quantized_layouts_equal_one_process[sharded]",
    "test_train_new_tokens.py::test_transformers_generates_new_tokens",
    "test_decode_once.py",
    # Complete runs and layouts. Unit tests and random recipes (tests/fuzz) check the same property.
    "test_train_early_stopping.py",
    "test_train_new_tokens.py::test_checkpoint_resumes_in_other_layout",
    "test_train_quantization.py::test_checkpoint_resumes_in_other_layout[sharded]",
    "test_loss_term_layouts.py::test_loss_is_cross_entropy",
}
"""Tests and files marked `campaign`."""
EVERY_FIFTH = {
    "test_action_flops.py::test_cost_model_flops_match_torch",
    "test_adapter_costs.py::test_adapter_flops_match_torch",
    "test_adapters.py::test_encoder_adapters_match_merged_weights",
    "test_adapters.py::test_llm_adapters_of_all_layers_match_merged_weights",
    "test_adapters.py::test_unsupported_peft_settings_are_rejected",
    "test_changed_data.py::test_changed_data_is_rejected_unless_accepted",
    "test_chunked_loss.py::test_chunked_loss_matches_full_logits",
    "test_classic_schedules.py::test_multimodal_schedules_are_complete_and_valid",
    "test_compile_choice.py::test_auto_compiles_packed_encoders_with_rotary_positions",
    "test_compile_choice.py::test_cuda_graphs_require_images_of_one_size",
    "test_config_checks.py::test_encoder_settings_of_valid_size_are_accepted",
    "test_context_costs.py::test_context_costs_match_real_layers",
    "test_encoders.py::test_dummy_image_is_valid",
    "test_encoders.py::test_packed_images_and_audio_are_independent",
    "test_encoders.py::test_three_encoder_stages_match_full_encoder",
    "test_executions.py::test_runs_and_simulations_use_same_executions",
    "test_export_generation.py::test_exported_llm_generates_same_tokens",
    "test_export_generation.py::test_exported_multimodal_model_generates_same_tokens",
    "test_float32.py::test_model_has_float32_tensors_of_from_pretrained",
    "test_generation.py::test_model_trains_equally_after_generation",
    "test_generator.py::test_generator_context_is_input_of_head",
    "test_hf_io.py::test_encoder_loads_from_its_files",
    "test_hf_io.py::test_llm_files_round_trip_unchanged",
    "test_hf_io.py::test_multimodal_model_files_round_trip_unchanged",
    "test_hf_io.py::test_separate_modules_export_as_llava",
    "test_hf_io.py::test_separate_modules_export_to_loadable_directories",
    "test_initialize.py::test_all_tensors_are_initialized",
    "test_invalid_records.py::test_hostile_file_name_costs_one_sample",
    "test_invalid_records.py::test_hostile_text_costs_one_sample",
    "test_layer_operators.py::test_full_recomputation_repeats_all_but_last_matmul",
    "test_layer_operators.py::test_memory_traffic_matches_real_layers",
    "test_layer_operators.py::test_saved_bytes_match_live_memory",
    "test_llm.py::test_three_llm_stages_match_full_llm",
    "test_lockstep_simulation.py::test_lockstep_simulation_matches_naive_simulation",
    "test_loss_terms.py::test_terms_equal_torch",
    "test_lowering.py::test_random_orders_become_valid_plans",
    "test_lowering.py::test_schedules_become_valid_plans",
    "test_media_messages.py::test_producer_response_has_same_tiles",
    "test_media_options.py::test_published_records_have_same_clip",
    "test_model_stages.py::test_messages_match_predicted_shapes_and_dtypes",
    "test_multimodal.py::test_text_only_batch_matches_hugging_face",
    "test_omni.py::test_omni_audio_has_frames_of_extractor",
    "test_omni.py::test_omni_media_match_hugging_face",
    "test_orchestrate.py::test_orchestration_finds_optimum_and_alternatives",
    "test_paper_recipes.py::test_paper_recipes_resolve_and_build",
    "test_paper_recipes.py::test_simulated_images_match_the_modules",
    "test_paper_recipes.py::test_steps_of_paper_recipes_can_be_planned",
    "test_patch_embeddings.py::test_image_encoders_use_no_convolutions",
    "test_plan_costs.py::test_sliced_transfer_times_match_message_bytes",
    "test_real_flops.py::test_action_flops_match_torch",
    "test_real_flops.py::test_attention_flops_match_eager_attention",
    "test_real_flops.py::test_connector_flops_with_frozen_encoder_match_torch",
    "test_real_flops.py::test_encoder_family_flops_match_torch",
    "test_real_flops.py::test_llm_family_flops_match_torch",
    "test_real_flops.py::test_model_flops_match_torch",
    "test_specs.py::test_processor_output_is_valid_encoder_input",
    "test_specs.py::test_tensor_parallel_patterns_match_linear_layers",
    "test_speech_files.py::test_audio_matches_hugging_face_tokens_and_frames",
    "test_stages.py::test_stages_match_full_model",
    "test_tiles.py::test_tile_limit_lowers_resolution_of_all_images",
    "test_token_cache.py::test_cached_logits_match_full_text",
    "test_zoo_recipes.py::test_zoo_parameters_match_comment",
}
"""Tests with a case for each model family, layer, recipe or random problem.

A fifth of the cases always runs. The other cases are marked `survey`. The first case differs
between tests, so that each family has several tests that always run.
"""
