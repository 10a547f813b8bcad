"""What clients of other servers look for, and the test that shows that it is here; the second half of docs/support.md.

Every test goes through a socket. A row without one says what the server answers instead.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """test: "file::name" below tests/server/, or what is answered instead, in words."""

    what: str
    test: str


ROWS: dict[str, tuple[Row, ...]] = {
    "Start": (
        Row("flags in both spellings, `--config FILE`", "limits::test_a_file_sets_flags_and_the_line_wins"),
        Row("the published GLM-5.2 recipe's flags", "limits::test_the_published_recipe_starts_unchanged"),
        Row("refusals: one line, exit code 2, at once", "limits::test_refusals_come_at_once"),
        Row("`Ready:` once; 503 before", "lifetime::test_not_ready_while_loading_and_a_signal_ends_that"),
        Row("`--engine echo`", "clients::test_a_tool_loop_of_three_turns"),
        Row("`--uds`", "limits::test_a_unix_socket"),
        Row(
            "HTTPS, `--tokenizer`, `--generation-config vllm`",
            "limits::test_https_and_a_tokenizer_and_defaults_from_elsewhere",
        ),
        Row("`make serve`: tiny model, dcp 4, drafts", "tiny::test_drafts_and_the_prefix_cache_are_at_work"),
    ),
    "Routes": (
        Row("`POST /v1/chat/completions`", "chat::test_thinking_and_content_are_parted"),
        Row("`POST /v1/completions`", "completions::test_an_answer_has_the_fields_clients_read"),
        Row("`GET /v1/models`, `/v1/models/{id}`", "routes::test_models"),
        Row("`GET`, `HEAD /health`, `GET /version`", "routes::test_health_and_version"),
        Row("`/ready`, `/ping`, `/load`, `/server_info`, `/flush_cache`", "limits::test_small_routes"),
        Row("`GET /metrics`", "routes::test_metrics_are_text_that_prometheus_reads"),
        Row("`POST /tokenize`: the ids of generation", "chat::test_the_prompt_is_what_tokenize_gives"),
        Row("`POST /detokenize`", "routes::test_tokenize_and_back"),
        Row("`POST /reset_prefix_cache`, `/flush_cache`, while requests run too", "prefix::test_reset_forgets"),
        Row("`POST /v1/messages`", "clients::test_anthropic_messages"),
        Row("adaptive and redacted thinking, `x-api-key`", "flags::test_what_anthropics_agents_send"),
        Row("`POST /v1/messages/count_tokens`", "clients::test_anthropic_counts_what_it_takes"),
        Row("`POST /abort_requests`", "limits::test_requests_can_be_aborted_by_their_ids"),
        Row("`POST /start_profile`, `/stop_profile`", "tiny::test_a_profile_while_a_request_runs"),
        Row("`GET /openapi.json`; every route keeps to it", "schema::test_routes_keep_their_promises"),
        Row("`POST /v1/responses`, without a store", "responses::test_a_tool_loop"),
        Row("stored responses, `/v1/embeddings`, …: JSON 404", "errors::test_routes_and_methods_that_do_not_exist"),
        Row("wrong content type, wrong JSON: 400", "errors::test_bodies_that_are_not_json_objects"),
    ),
    "Fields of requests": (
        Row("`model`: any served name", "errors::test_models_that_do_not_exist"),
        Row("`messages`: roles, parts, reasoning, calls", "chat::test_messages_reach_the_template_in_its_own_form"),
        Row("`max_tokens`, `max_completion_tokens`", "chat::test_an_answer_cut_while_thinking_has_no_content"),
        Row(
            "no limit given: the rest of the context", "chat::test_the_answer_takes_the_rest_of_the_context_by_default"
        ),
        Row("`n`", "completions::test_choices_and_prompts_are_ordered_prompt_major"),
        Row("ranges of all numbers", "errors::test_fields_out_of_range"),
        Row("`seed`, `temperature`, `top_p`, …", "tiny::test_twenty_at_once_beside_a_long_prompt"),
        Row("defaults of `generation_config.json`", "lifetime::test_keys_limits_and_defaults"),
        Row("`logit_bias`, `stop_token_ids`", "completions::test_stop_token_ids_end_the_text_and_are_not_in_it"),
        Row("`allowed_token_ids`", "errors::test_fields_out_of_range"),
        Row("`bad_words`", "structure::test_bad_words_do_not_come"),
        Row("`stop`, over tokens and inside an accepted run", "completions::test_tokens_after_a_stop_are_not_billed"),
        Row("`include_stop_str_in_output`", "completions::test_streamed_equals_whole_and_stops_span_tokens"),
        Row("`ignore_eos`, `min_tokens`", "completions::test_min_tokens_and_ignore_eos"),
        Row("`logprobs`, `top_logprobs` (chat)", "chat::test_logprobs_have_the_tokens_own_bytes"),
        Row("`logprobs` (completions)", "completions::test_logprobs_are_parallel_lists"),
        Row("`prompt_logprobs`; `echo` with `logprobs`", "completions::test_prompts_have_logprobs_too"),
        Row("`echo`", "completions::test_echo_gives_the_prompt_first"),
        Row("`response_format`, `structured_outputs`, `guided_*`", "structure::test_text_that_fits_is_not_changed"),
        Row("`tools`, `tool_choice: auto`", "clients::test_a_tool_loop_of_three_turns"),
        Row("`tool_choice: required`, a name", "structure::test_forced_calls_in_the_models_own_form"),
        Row("`tool_choice: none`, `parallel_tool_calls`", "clients::test_wishes_about_calls"),
        Row("`reasoning_effort`, `thinking`", "chat::test_without_thinking_all_is_content"),
        Row("less effort is never more", "chat::test_the_effort_asked_for_never_becomes_more"),
        Row("`chat_template`, if trusted", "limits::test_templates_from_requests_only_if_trusted"),
        Row("`continue_final_message`", "chat::test_continuing_a_message"),
        Row("`separate_reasoning`, `include_reasoning`", "chat::test_reasoning_can_be_left_in_or_out"),
        Row("`no_store`", "prefix::test_no_store_reads_but_leaves_nothing"),
        Row("`cache_salt`", "prefix::test_salts_do_not_share"),
        Row(
            "`priority`, with `--scheduling-policy priority`",
            "limits::test_the_urgent_are_served_first_and_pages_are_found_by_another_hash",
        ),
        Row("`return_token_ids`", "chat::test_the_prompt_is_what_tokenize_gives"),
        Row("`return_tokens_as_token_ids`", "structure::test_tokens_by_id"),
        Row("`truncate_prompt_tokens`", "completions::test_truncated_prompts_keep_their_end"),
        Row("`request_id`, `X-Request-Id`", "completions::test_ids_carry_the_clients_own_suffix"),
        Row("no `seed`: another one each time", "tiny::test_without_a_seed_no_two_answers_are_alike"),
        Row(
            "`null`, unknown fields, `user`, `store`, `prompt_cache_key`, …",
            "chat::test_null_and_unknown_fields_do_not_count",
        ),
        Row("`use_beam_search`, `audio`, `functions`, …: 400", "errors::test_chat_bodies"),
    ),
    "Streams": (
        Row("streamed equals whole", "chat::test_streamed_equals_whole"),
        Row("calls streamed equal those of the whole", "clients::test_streamed_calls_are_those_of_the_whole"),
        Row("usage: last, and only when asked for", "completions::test_usage_comes_last_and_only_when_asked_for"),
        Row("`--stream-interval`", "limits::test_chunks_of_several_tokens"),
        Row("an error after 200", "lifetime::test_the_engines_death_fails_what_is_pending_and_ends_the_process"),
        Row("refused before it begins", "errors::test_a_stream_is_refused_before_it_begins"),
        Row("Anthropic events", "clients::test_anthropic_streams_with_tools_and_thinking"),
    ),
    "Chat format": (
        Row(
            "control tokens typed into messages are text",
            "limits::test_control_tokens_in_messages_are_text_unless_allowed",
        ),
        Row("`--chat-template`, `--max-logprobs`", "flags::test_another_template_and_no_limit_of_log_probabilities"),
        Row("`--no-enable-auto-tool-choice`", "flags::test_calls_that_nothing_forced_can_stay_text"),
        Row("`glm45`, `glm47` off", "limits::test_parsers_can_be_switched_off"),
        Row("`--reasoning-field`", "limits::test_names_of_the_thinking_and_usage_as_flags_say"),
        Row("a grammar begins behind the thinking", "structure::test_thinking_is_free_and_its_end_begins_the_grammar"),
    ),
    "Errors and limits": (
        Row("400 names the field", "errors::test_fields_out_of_range"),
        Row("too long for the context", "errors::test_the_context_message_has_all_numbers"),
        Row("401", "lifetime::test_keys_limits_and_defaults"),
        Row("a key for all but a few routes", "limits::test_all_but_a_few_routes_need_a_key"),
        Row("`--root-path`", "limits::test_a_proxys_prefix_opens_nothing"),
        Row("413, whatever the header says", "lifetime::test_keys_limits_and_defaults"),
        Row("429", "limits::test_a_full_queue_refuses"),
        Row("503 while draining", "lifetime::test_a_signal_drains_and_ends_with_0"),
        Row("504", "limits::test_time_runs_out"),
        Row("CORS", "limits::test_browsers_are_told_who_may_ask"),
        Row("Anthropic's errors", "clients::test_anthropic_refusals"),
    ),
    "Life of a request": (
        Row("a client that leaves", "lifetime::test_a_client_that_goes_away_stops_its_requests"),
        Row("a signal drains", "lifetime::test_a_signal_drains_and_ends_with_0"),
        Row("a second one ends at once", "lifetime::test_a_second_signal_ends_at_once"),
        Row("either process may be killed", "lifetime::test_the_engines_process_may_be_killed"),
        Row(
            "what is not done in time is aborted",
            "lifetime::test_what_is_not_done_when_the_time_is_up_is_aborted_with_a_last_chunk",
        ),
        Row("a long prompt does not stall others", "structure::test_a_long_prompt_does_not_stall_a_stream"),
        Row("clients that misbehave", "soak::test_a_minute"),
        Row("`--enable-log-requests`, `--uvicorn-log-level`", "flags::test_a_line_for_every_request"),
        Row("nothing of a request waits for the collector", "remains::test_nothing_waits_for_the_collector"),
        Row("many at once give the texts of one at a time", "tiny::test_twenty_at_once_beside_a_long_prompt"),
    ),
    "Prefix cache and metrics": (
        Row("`cached_tokens` is what was taken over", "prefix::test_br_16_what_is_reported_is_what_was_taken_over"),
        Row("later turns find earlier ones", "flags::test_a_turn_is_found_again_if_its_thinking_is_kept"),
        Row("vLLM's metrics", "routes::test_metrics_of_the_dashboards_are_all_there"),
        Row("time of grammars' masks", "structure::test_masks_are_timed"),
        Row(
            "tokens by rank, memory by device, compilation",
            "tiny::test_the_tokens_of_a_request_are_dealt_out_to_four_ranks",
        ),
        Row("drafts", "prefix::test_drafts_are_counted_by_request_and_in_all"),
    ),
}


def render() -> list[str]:
    """Lines of Markdown."""
    lines = ["", "# What the server answers", "", "Tests lie in `tests/server/`; each goes through a socket."]
    for title, rows in ROWS.items():
        lines += ["", f"## {title}", "", "| what | shown by |", "|---|---|"]
        for row in rows:
            file, found, name = row.test.partition("::")
            lines.append(f"| {row.what} | {f'`test_{file}.py::{name}`' if found else row.test} |")
    return lines
