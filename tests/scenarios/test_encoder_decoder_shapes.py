"""Encoder-decoder models with the sizes of released ones: transformers' greedy ids in float32.

The same bits in every batch, chunk, preemption, pipeline and on two tensor-parallel ranks.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from full_size_models import (
    BLOCK_SIZE,
    NUM_TOKENS,
    PENALTY,
    RATE,
    SHAPES,
    WHISPER_PROMPT,
    are_double_ids,
    full_size,
    full_size_prompts,
    greedy_ids,
    speech_sound,
    speech_with_rules,
)
from jobs_of_rows import answers_of_job
from speech_models import their_transcripts, wave_file
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from spmd_worker import LLM, PromptsRefusedError, SamplingParams, TokenRules
from spmd_worker.media.audio_windows import windows
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.leaves import num_leaves
from spmd_worker.replica.sequence.decoder_prompt import decoder_prompt, detected_language

WINDOW_S = 30
LAYOUTS = ("tensor_parallel_size", "pipeline_parallel_size")


def opened(folder: Path, name: str, **options: Any) -> LLM:
    is_audio = name.startswith("whisper")
    return LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        max_num_seqs=8,
        max_model_len=40,
        max_encoder_len=None if is_audio else 416,
        skip_tokenizer_init=is_audio,
        block_size=BLOCK_SIZE,
        **{"num_blocks": 1600, **options},
    )


def answers(llm: LLM, prompts: list[dict[str, Any]]) -> list[Any]:
    """Ids and log-probabilities of each."""
    penalty = 1.0 if "multi_modal_data" in prompts[0] else PENALTY
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, repetition_penalty=penalty
    )
    found = []
    for each in llm.generate(prompts, params, use_tqdm=False):
        assert each.outputs[0].logprobs is not None, each.error
        scores = [next(iter(position.values())).logprob for position in each.outputs[0].logprobs]
        found.append([[*each.outputs[0].token_ids], scores])
    return found


def ids_of(found: list[Any]) -> list[list[int]]:
    return [each[0] for each in found]


@pytest.mark.guarantee("encoder-decoder models of released sizes: transformers' ids", is_control_inside=True)
@pytest.mark.stress
@pytest.mark.parametrize("name", SHAPES)
def test_full_sizes_give_transformers_ids_everywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    shape = full_size(name)
    wanted = [greedy_ids(shape, each) for each in shape.inputs]
    assert are_double_ids(shape, wanted), "transformers' float32 is not its float64"
    with opened(shape.folder, name) as llm:
        alone = [answers(llm, [each])[0] for each in shape.prompts]
        # Negative control: another input, other numbers.
        assert len({str(each) for each in wanted}) > len(wanted) // 2
        assert len({str(scores) for _, scores in alone}) == len(alone)
        assert ids_of(alone) == wanted
        assert answers(llm, shape.prompts) == alone
        llm.reset_prefix_cache()
        assert answers(llm, shape.prompts) == alone
    for mode, swap_space in (("recompute", 0), ("swap", 1)):
        # Each has one block more than it began with, and wants three.
        options = {"num_blocks": shape.num_blocks_at_start + 12, "preemption_mode": mode, "max_encode_patches": 3000}
        with opened(shape.folder, name, swap_space=swap_space, max_num_batched_tokens=shape.chunk, **options) as llm:
            assert answers(llm, shape.prompts) == alone
            counters = llm.llm_engine.counters
            assert counters.num_preemptions > 0
            assert bool(counters.num_swapped_in) == (mode == "swap")
    # Each rank of two has complete leaves of their sums.
    assert num_leaves(read_model_files(shape.folder).model_config, 8) % 2 == 0
    for layout in LAYOUTS:
        ranks.run_forked([__file__, name, layout, shape.folder, tmp_path], 2, timeout_s=400).checked()
        first, second = (json.loads((tmp_path / f"{layout} {rank}").read_text()) for rank in range(2))
        assert first == second
        assert ids_of(first) == wanted
        assert first == alone
    lengths = sorted({len(each) for each in wanted})
    print(f"\nSHAPE {name}: {len(wanted)} inputs, answers of {lengths} tokens, transformers' in every layout", end="")


SPEECH: dict[str, dict[str, Any]] = {
    "timestamps": {"language": "en", "timestamps": True},
    "detected language": {},
    "detected language, timestamps": {"timestamps": True},
}
LONG_S = 67.0


@pytest.mark.stress
@pytest.mark.parametrize("name", SPEECH)
def test_full_size_speech_follows_the_rules(name: str, tmp_path: Path) -> None:
    """Three windows of a long recording, and short ones: transformers' ids of each, alone and in a batch; a row of the
    recording has those of its windows.
    """
    files = [wave_file(speech_sound(length_s, 20 + index)) for index, length_s in enumerate((LONG_S, 4.0, 30.0))]
    sounds = [np.frombuffer(each[44:], "<i2").astype(np.float32) / 32768 for each in files]
    pieces = [each.samples for samples in sounds for each in windows(samples, WINDOW_S * RATE)]
    assert len(pieces) == 5
    folder = speech_with_rules(tmp_path / "speech")
    reference = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    features = WhisperFeatureExtractor()(pieces, sampling_rate=RATE, return_tensors="pt").input_features
    wanted = [their_transcripts(reference, each[None], SPEECH[name], NUM_TOKENS)[0] for each in features]
    with opened(folder, "whisper-tiny") as llm:
        generation = llm.llm_engine.resolved.decoder
        assert generation is not None
        made = decoder_prompt(generation, **SPEECH[name])
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, token_rules=made.rules, detokenize=False)
        prompts = [
            {"prompt_token_ids": [*made.token_ids], "multi_modal_data": {"audio": (each, RATE)}} for each in pieces
        ]
        together = llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        alone = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
        for found in (together, alone):
            assert [[*made.token_ids, *each.outputs[0].token_ids] for each in found] == wanted
        # Negative control: without rules other tokens are likelier.
        plain = llm.generate(prompts, replace(params, token_rules=TokenRules(min_new_tokens=1)), use_tqdm=False)
        assert [each.outputs[0].token_ids for each in plain] != [each.outputs[0].token_ids for each in alone]
        with pytest.raises(PromptsRefusedError, match="as 3 prompts"):
            llm.generate([{**prompts[0], "multi_modal_data": {"audio": (sounds[0], RATE)}}], params, use_tqdm=False)
    (tmp_path / "long.wav").write_bytes(files[0])
    row = {"audio": "long.wav", "temperature": 0, "max_tokens": NUM_TOKENS, **SPEECH[name]}
    (answer,) = answers_of_job(tmp_path, folder, [row], media_root=tmp_path)
    joined = [token_id for each in together[:3] for token_id in each.outputs[0].token_ids]
    assert answer["outputs"][0]["token_ids"] == joined
    has_stamps = [any(each > WHISPER_PROMPT[-1] for each in row) for row in wanted]
    # Random weights may give some without being asked.
    assert all(has_stamps) or "timestamps" not in name
    assert all(detected_language(generation, row) for row in wanted)
    assert len({str(each) for each in wanted}) > len(wanted) // 2


def main(name: str, layout: str, model: Path, folder: Path) -> None:
    """Writes a rank's answers."""
    with opened(model, name, **{layout: 2}) as llm:
        rank = llm.llm_engine.engine_channel.rank
        (folder / f"{layout} {rank}").write_text(json.dumps(answers(llm, full_size_prompts(name))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
