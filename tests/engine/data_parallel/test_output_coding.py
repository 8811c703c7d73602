"""Outputs that travelled are what they were: types, order and the last bit."""

import math

import numpy as np

from spmd_worker.engine.data_parallel.output_coding import decode_outputs, encode_outputs
from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput
from spmd_worker.replica.sequence.prompt_scores import PromptScores
from spmd_worker.replica.sequence.sampling_mask import SamplingMask, pack_ids

LOGPROBS = [{7: Logprob(-0.1, 2, " a"), 3: Logprob(1e-300, 1, None)}, {3: Logprob(-math.inf, 9, "\ud83d")}]


def test_outputs_are_equal_after_travelling():
    outputs = {
        5: RequestOutput(
            "5",
            "a prompt\u2028 of \U0001f600",
            [1, 2, 3],
            [
                CompletionOutput(0, "text", [7, 3], -1.25, LOGPROBS, "stop", "\n"),
                CompletionOutput(1, "", [4], None, None, "length", 4),
            ],
            finished=True,
            prompt_logprobs=[None, *LOGPROBS],
            num_cached_tokens=16,
        ),
        0: RequestOutput("0", None, [], finished=True, error="refused"),
    }
    decoded = decode_outputs(encode_outputs(outputs))
    assert decoded == outputs
    assert list(decoded) == [5, 0]
    completion = decoded[5].outputs[0]
    assert completion.logprobs is not None
    assert list(completion.logprobs[0]) == [7, 3]
    assert isinstance(completion.logprobs[0][7], Logprob)
    assert math.copysign(1.0, completion.logprobs[1][3].logprob) == -1.0


def test_arrays_are_equal_after_travelling():
    scores = PromptScores(2, np.float32([-0.5, -np.inf]), np.float32([[-1.0], [-2.0]]))
    experts = np.uint16([[[300, 2]], [[1, 0]]])
    mask = SamplingMask.from_packed([pack_ids((5, 6)), pack_ids((9,))])
    completion = CompletionOutput(0, "", [5, 9], sampling_mask=mask, routed_experts=experts[:1])
    output = RequestOutput("1", None, [1, 2], [completion], prompt_scores=scores, prompt_routed_experts=experts)
    (decoded,) = decode_outputs(encode_outputs({1: output})).values()
    assert decoded == output
    assert decoded.prompt_token_id_logprobs.tolist() == [[-1.0], [-2.0]]
    for mine, its in (
        (experts, decoded.prompt_routed_experts),
        (experts[:1], decoded.outputs[0].routed_experts),
    ):
        assert (its.dtype, its.tolist()) == (mine.dtype, mine.tolist())


def test_no_outputs_travel_too():
    assert decode_outputs(encode_outputs({})) == {}
