"""Thirty public reports of what went wrong in other job APIs, and the trial of each on ours, by name.

A trial that is renamed or removed fails here. Batches of the OpenAI kind (reports 18 and 19) are not served.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAULTS, WORKER, API, HOOKS = "worker/faults", "worker", "api", "webhooks"
TRIALS = {
    "celery/celery#5935: run again after the visibility timeout": (
        f"{FAULTS}/test_processes.py",
        "test_a_job_longer_than_the_visibility_timeout_runs_once",
    ),
    "celery/celery#8030: connected, but consumes nothing": (
        f"{FAULTS}/test_broker_faults.py",
        "test_killed_connections_of_everybody_cost_no_job_and_no_second_run",
    ),
    "celery/celery#10205: not ready while Redis is away": (
        f"{API}/test_known_reports.py",
        "test_an_unreachable_store_is_a_503_and_the_process_stays_healthy",
    ),
    "celery/celery#1628: lost with a killed child": (
        f"{WORKER}/test_life_of_a_worker.py",
        "test_a_killed_child_does_not_wait_for_its_lease_to_run_out",
    ),
    "OasisLMF/OasisPlatform#975: a poison task for ever": (
        f"{WORKER}/test_life_of_a_worker.py",
        "test_a_poison_job_fails_after_three_attempts_and_its_mates_are_answered",
    ),
    "celery/celery#4450: waiting, unknown and expired look alike": (
        f"{API}/test_job_life.py",
        "test_unknown_waiting_failed_and_expired_jobs_tell_themselves_apart",
    ),
    "celery/celery#8588: succeeded without a result": (
        f"{FAULTS}/test_broker_faults.py",
        "test_a_full_redis_keeps_every_job_and_still_takes_the_running_ones_result",
    ),
    "celery/celery#4300: a revocation lost while workers were down": (
        f"{API}/test_known_reports.py",
        "test_cancel_without_workers_holds_when_a_worker_comes",
    ),
    "celery/celery#2620: revoking finished tasks stops the consumer": (
        f"{FAULTS}/test_processes.py",
        "test_a_thousand_cancels_of_finished_jobs_change_nothing",
    ),
    "celery/celery#4354: lost at a warm shutdown": (
        f"{FAULTS}/test_processes.py",
        "test_every_worker_in_turn_may_be_replaced_under_load",
    ),
    "celery/celery#4537: short tasks behind a long one": (
        f"{FAULTS}/test_processes.py",
        "test_a_long_offline_turn_does_not_hold_up_short_jobs",
    ),
    "celery/celery#3402: CUDA in a forked child": (
        "wake/test_celery_app.py",
        "test_other_pools_are_refused",
    ),
    "celery/celery#5716: a full Redis": (
        f"{FAULTS}/test_broker_faults.py",
        "test_a_filling_redis_refuses_new_jobs_and_finishes_the_old_ones",
    ),
    "celery/celery#7801: a Redis that evicts": (
        "up/test_broker.py",
        "test_a_server_that_evicts_is_refused",
    ),
    "celery/celery#10462: MemoryError blocks the pool": (
        f"{WORKER}/test_turns.py",
        "test_the_job_at_fault_fails_alone_and_the_worker_goes_on",
    ),
    "replicate/replicate-python#460: a new final status": (
        "client/test_client.py",
        "test_a_status_that_we_do_not_know_ends_the_wait_if_the_job_is_done",
    ),
    "replicate/replicate-javascript#195: webhooks that fail unseen": (
        f"{HOOKS}/test_sender.py",
        "test_failures_are_tried_again_with_one_id_and_the_same_bytes",
    ),
    "replicate/replicate-javascript#341: a receiver that nobody reaches": (
        f"{HOOKS}/test_sender.py",
        "test_nobody_there_and_no_answer_are_told_apart_in_the_log",
    ),
    "runpod/runpod-python#250: progress after the end": (
        "store/test_ends.py",
        "test_progress_cannot_touch_a_job_that_is_done",
    ),
    "wlsdml1114/Engui_Studio#21: gone taken for not there yet": (
        f"{API}/test_known_reports.py",
        "test_gone_is_told_with_the_time_and_not_as_unknown",
    ),
    "vllm-project/vllm#57999: cancelling what is done": (
        f"{API}/test_job_life.py",
        "test_cancel_is_idempotent_in_every_state",
    ),
    "bentoml/BentoML#5694: an exception leaves a row half done": (
        f"{API}/test_known_reports.py",
        "test_what_breaks_inside_is_a_500_that_tells_nothing",
    ),
    "Lightning-AI/LitServe#165: an abandoned request computes on": (
        f"{API}/test_real_clients.py",
        "test_an_abandoned_call_cancels_its_job_unless_somebody_asks_again",
    ),
    "mlflow/mlflow#24179: webhooks that reach inside": (
        f"{HOOKS}/test_egress.py",
        "test_a_name_that_flips_between_judging_and_connecting_gains_nothing",
    ),
    "frankbria/codeframe#706: and by odd addresses": (
        f"{HOOKS}/test_egress.py",
        "test_a_hostile_url_opens_no_connection",
    ),
    "jcagarcia/grape-idempotency#10: both of two run": (
        f"{API}/test_job_life.py",
        "test_an_idempotency_key_makes_one_job_of_fifty_posts",
    ),
    "ecotask-network/EcoTask-backend#57: a crash before the webhook is noted": (
        "store/test_ends.py",
        "test_the_webhook_outbox_is_written_with_the_status",
    ),
    "LabsCrypt/remitlend#655: retries that never run": (
        f"{HOOKS}/test_sender.py",
        "test_a_sender_killed_on_its_way_leaves_the_delivery_to_the_next",
    ),
    "cvat-ai/cvat#10578: a slow receiver blocks the others": (
        f"{HOOKS}/test_sender.py",
        "test_a_receiver_that_hangs_delays_no_other",
    ),
    "openstory-so/openstory#828: a queue that looks like a hang": (
        f"{API}/test_known_reports.py",
        "test_place_and_estimate_in_the_queue_move",
    ),
    "fal-ai/fal-java#9: a client without timeouts": (
        "client/test_client.py",
        "test_every_request_has_an_end",
    ),
    "BerriAI/litellm#7518: a long poll cut off": (
        f"{API}/test_job_life.py",
        "test_a_long_poll_that_ends_first_is_a_plain_200",
    ),
    "vllm 0.33, validation.py: an error of 23 MB": (
        f"{API}/test_refusals.py",
        "test_no_input_makes_the_error_body_larger_than_16_kb",
    ),
    "runpod 1.12.0: https is never tried again": (
        "client/test_client.py",
        "test_a_submission_is_tried_again_under_one_key",
    ),
}


@pytest.mark.parametrize("report", TRIALS)
def test_the_trial_of_a_report_is_still_there(report):
    file, name = TRIALS[report]
    assert f"def {name}(" in (TESTS / file).read_text()
