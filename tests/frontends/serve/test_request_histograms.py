"""Histograms of requests: vLLM's buckets, observed at given times; and the text of `/metrics` for a reader of it."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ServedHere
from waiting import wait_until

from spmd_worker.compat.metrics import Histogram
from spmd_worker.frontends.serve.request_histograms import RequestHistograms
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestMetrics, RequestOutput
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason

TEXT = "/v1/completions"


def sequence_of(request_id: int) -> Any:
    """Fields that are read of a running sequence."""
    sequence = SimpleNamespace(request=SimpleNamespace(request_id=request_id), output_token_ids=[], finish_reason=None)
    return Hashed(**vars(sequence))


class Hashed(SimpleNamespace):
    __hash__ = object.__hash__


def output_of(*samples: int, reason: str = "stop", error: str | None = None, **times: float) -> RequestOutput:
    completions = [CompletionOutput(i, "", [0] * number, finish_reason=reason) for i, number in enumerate(samples)]
    metrics = RequestMetrics(num_generation_tokens=sum(samples), **times)
    return RequestOutput("0", None, [1] * 5, completions, finished=True, error=error, metrics=metrics)


def found_in(histograms: RequestHistograms) -> dict[str, Histogram]:
    return {each.name.removeprefix("vllm:"): each for each in histograms.metrics() if each.count}


def test_times_between_tokens_are_observed_each_step():
    histograms, first, second = RequestHistograms("m", 100), sequence_of(0), sequence_of(0)
    histograms.begin(RequestId(0), 10.0)
    histograms.step([first], 11.0)
    assert found_in(histograms) == {}
    for now_s, num_tokens in ((12.0, 1), (12.25, 1), (12.5, 2), (14.5, 5)):
        for each in (first, second):
            each.output_token_ids = [0] * num_tokens
        # Preempted, it is not running.
        histograms.step([first] if now_s == 12.25 else [first, second], now_s)
    found = found_in(histograms)
    # Once for a request, whichever sample is first; a step without a token is no interval, one with three is one.
    assert (found["time_to_first_token_seconds"].count, found["time_to_first_token_seconds"].sum) == (1, 2.0)
    intervals = found["inter_token_latency_seconds"]
    assert (intervals.count, intervals.sum) == (4, 5.0)
    assert [intervals.buckets[bound] for bound in (0.4, 0.5, 1.0, 2.5)] == [0, 2, 2, 4]
    for each in (first, second):
        each.output_token_ids, each.finish_reason = [0] * 6, FinishReason.STOP
    histograms.step([], 15.5)
    assert found_in(histograms)["inter_token_latency_seconds"].count == 6
    histograms.step([], 16.5)
    assert found_in(histograms)["inter_token_latency_seconds"].count == 6
    assert not histograms._decoding


def test_ended_request_is_observed_once():
    histograms, times = RequestHistograms("m", 100), {"queued_ts": 2.0, "scheduled_ts": 3.0, "first_token_ts": 5.0}
    histograms.begin(RequestId(7), 1.0)
    output = output_of(3, 5, last_token_ts=9.0, **times)
    histograms.end(RequestId(7), output, SamplingParams(n=2, max_tokens=50), 1.0, 9.5)
    assert {name: (each.count, each.sum) for name, each in found_in(histograms).items()} == {
        "time_to_first_token_seconds": (1, 4.0),
        "request_time_per_output_token_seconds": (1, 1.0),
        "e2e_request_latency_seconds": (1, 8.5),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 4.0),
        "request_inference_time_seconds": (1, 6.0),
        "request_prompt_tokens": (1, 5.0),
        "request_generation_tokens": (1, 8.0),
        "request_params_n": (1, 2.0),
        "request_params_max_tokens": (1, 50.0),
    }
    prompt = found_in(histograms)["request_prompt_tokens"]
    assert prompt.buckets == {1.0: 0, 2.0: 0, 5.0: 1, 10.0: 1, 20.0: 1, 50.0: 1, 100.0: 1}
    # A vector has no tokens.
    histograms.end(RequestId(8), output_of(queued_ts=2.0, scheduled_ts=3.0), None, 1.0, 2.0)
    counts = {name: each.count for name, each in found_in(histograms).items()}
    assert (counts["e2e_request_latency_seconds"], counts["request_generation_tokens"]) == (2, 1)


@pytest.mark.parametrize("output", [output_of(0, reason="abort"), output_of(error="no", queued_ts=1.0)], ids=str)
def test_request_without_answer_is_not_observed(output: RequestOutput):
    histograms = RequestHistograms("m", 100)
    histograms.begin(RequestId(0), 1.0)
    histograms.end(RequestId(0), output, SamplingParams(), 1.0, 2.0)
    assert found_in(histograms) == {}
    assert not histograms._unbegun


def test_metrics_are_read_as_prometheus_reads_them():
    with ServedHere(max_queued=8) as server:

        def read() -> str:
            return server.client.ask("/metrics", method="GET")[1]["text"]

        bodies = [{"max_tokens": 6, "ignore_eos": True}, {"max_tokens": 1}, {"structured_outputs": {"choice": ["a"]}}]
        for body in bodies:
            assert server.client.ask(TEXT, {"prompt": [5, 6, 7], "temperature": 0, **body})[0] == 200
        server.allow(5)
        long = {"prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "max_tokens": 250}
        connection = server.client.send(TEXT, long)
        server.wait_for_steps()
        connection.close()
        wait_until(lambda: server.exchange.num_sequences == 0)
        server.allow(None)
        wait_until(lambda: 'finished_reason="abort"} 1' in read())
        text = read()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == text.count("# TYPE ")
    ends = {each.labels["finished_reason"]: each.value for each in families["vllm:request_success"].samples}
    assert ends == {"length": 2, "stop": 1, "abort": 1, "error": 0, "repetition": 0}
    found = {}
    for family in families.values():
        if family.type != "histogram":
            continue
        *buckets, total, count = family.samples
        assert {each.labels["model_name"] for each in family.samples} == {"model"}
        values, bounds = [each.value for each in buckets], [float(each.labels["le"]) for each in buckets]
        assert (values, bounds) == (sorted(values), sorted(set(bounds)))
        assert (bounds[-1], values[-1]) == (float("inf"), count.value)
        assert (total.name, count.name) == (f"{family.name}_sum", f"{family.name}_count")
        found[family.name.removeprefix("vllm:")] = (count.value, total.value)
    assert len(found) == 12
    assert found["request_prompt_tokens"] == (3, 9)
    num_output = families["vllm:generation_tokens"].samples[0].value
    # The aborted one was not answered, but had tokens.
    assert found["request_generation_tokens"][0] == 3
    assert found["request_generation_tokens"][1] < num_output
    assert found["time_to_first_token_seconds"][0] == 4
    assert found["inter_token_latency_seconds"][0] == num_output - 4
    assert found["e2e_request_latency_seconds"][1] > found["request_inference_time_seconds"][1] > 0
