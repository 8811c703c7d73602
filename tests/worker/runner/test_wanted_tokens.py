"""The last layer of a step computes the tokens that rows sample from, and of others keys and values: the same bits."""

from pathlib import Path

import pytest
import torch
from adapter_folders import write_lora
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from ranks import REPOSITORY
from reference_models import checkpoint_folder

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.ops.attention.metadata import WantedTokens
from spmd_worker.worker.runner import batch as batch_module

DEMO = REPOSITORY / "scripts" / "demo" / "model"
FOLDERS = {
    "demo": lambda: DEMO,
    "llama3": lambda: checkpoint_folder("llama3"),
    "qwen2": lambda: checkpoint_folder("qwen2"),
    "qwen3": lambda: checkpoint_folder("qwen3"),
    "granite": lambda: family_folder("granite"),
    "smollm3": lambda: family_folder("smollm3"),
}
"""Plain; other ropes; biases; norms of heads; multipliers; a last layer without a rope."""

Answers = list[tuple[list[int], list[dict[int, float]]]]


class Counts:
    """Of the last layer's tokens: those that came, and those that more was computed of than keys and values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shift: int = 0) -> None:
        self.all, self.wanted = [], []
        forward = DecoderLayer.forward

        def counted(layer, part, residual, step):
            wanted = step.wanted
            if wanted is not None:
                self.all.append(len(residual))
                self.wanted.append(len(wanted.rows))
                step.wanted = WantedTokens((wanted.rows - shift).clamp(min=0), wanted.metadata)
            return forward(layer, part, residual, step)

        monkeypatch.setattr(DecoderLayer, "forward", counted)


def answers(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, least: int, **settings: object) -> Answers:
    """Prompts of several lengths, some in chunks, beside rows that decode; greedy, drawn, and two samples of one."""
    monkeypatch.setattr(batch_module, "_MIN_LEFT_OUT", least)
    prompts = [[3 + (row * 31 + at * 17) % 90 for at in range(length)] for row, length in enumerate((70, 9, 40, 1, 23))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=4, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=3, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    ]
    with LLM(folder, dtype=dtype, num_blocks=64, max_num_batched_tokens=48, max_num_seqs=8, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (each.token_ids, [{token: entry.logprob for token, entry in at.items()} for at in each.logprobs or []])
        for output in outputs
        for each in output.outputs
    ]


@pytest.mark.gate("demo-float32", "qwen2-bfloat16", "granite-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FOLDERS)
def test_row_bits_equal_when_layer_skips_tokens(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str):
    folder = FOLDERS[name]()
    expected = answers(folder, dtype, monkeypatch, 10**6)
    counts = Counts(monkeypatch)
    assert answers(folder, dtype, monkeypatch, 1) == expected
    # Chunks of which nobody samples as well, and steps of rows that only decode are not among them.
    assert min(counts.wanted) == 0
    assert max(counts.wanted) > 1
    assert all(wanted < count for wanted, count in zip(counts.wanted, counts.all, strict=True))


def test_another_token_in_its_place_is_found(monkeypatch: pytest.MonkeyPatch):
    expected = answers(DEMO, "float32", monkeypatch, 10**6)
    Counts(monkeypatch, shift=1)
    assert answers(DEMO, "float32", monkeypatch, 1) != expected


def test_no_tokens_skipped_when_more_outputs_needed(monkeypatch: pytest.MonkeyPatch):
    counts = Counts(monkeypatch)
    monkeypatch.setattr(batch_module, "_MIN_LEFT_OUT", 1)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(DEMO, dtype="float32", num_blocks=64) as llm:
        llm.generate([[5] * 40, [6] * 50], [scored, SamplingParams(temperature=0.0, max_tokens=1)], use_tqdm=False)
        assert counts.all == []
        # Control: without it.
        llm.generate([[7] * 40], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        assert counts.all == [40]
    with LLM(expert_folder("qwen3_moe"), dtype="float32", num_blocks=64) as llm:
        llm.generate([[7] * 40], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    assert counts.all == [40]


def test_what_is_wanted_is_told_literally():
    from test_batch import STEP

    step = batch_module.build_batch(STEP, 4, torch.device("cpu"))
    assert batch_module.wanted_tokens(STEP, step) is None
    least, batch_module._MIN_LEFT_OUT = batch_module._MIN_LEFT_OUT, 7
    try:
        wanted, samples = batch_module.wanted_tokens(STEP, step)
    finally:
        batch_module._MIN_LEFT_OUT = least
    assert wanted.rows.tolist() == [2, 3, 9]
    # The first forks.
    assert samples.tolist() == [0, 0, 1, 2]
    assert (wanted.metadata.query_starts, wanted.metadata.context_lengths) == ((0, 1, 2, 3), (3, 8, 5))
    assert wanted.metadata.token_blocks.tolist() == [5, 2, 3]
    assert wanted.metadata.token_offsets.tolist() == [2, 3, 0]
    assert [table[:2] for table in wanted.metadata.block_tables.tolist()] == [[5, 0], [7, 2], [0, 3]]


def test_adapters_of_wanted_tokens_are_their_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Prompts of several lengths with two adapters and none; with others' adapters the answers differ."""
    prompts = [[3 + (row * 31 + at * 17) % 90 for at in range(length)] for row, length in enumerate((70, 9, 40, 23))]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    options = {"enable_lora": True, "max_loras": 2}
    requests = [LoRARequest(str(seed), seed, write_lora(tmp_path / str(seed), seed)) for seed in (1, 2)]
    with LLM(DEMO, dtype="bfloat16", num_blocks=64, max_num_batched_tokens=48, max_num_seqs=8, **options) as llm:
        engine, found = llm.llm_engine, []
        digests = [0, *(engine.adapters.digest_of(request) for request in requests)]
        for least in (1, 10**6):
            monkeypatch.setattr(batch_module, "_MIN_LEFT_OUT", least)
            for order in ((1, 0, 2, 1), (2, 1, 0, 0)):
                engine.changes.reset_prefix_cache()
                for prompt, adapter in zip(prompts, order, strict=True):
                    engine.requests.add(PromptContent(prompt, adapter=digests[adapter]), params)
                answers = {}
                while engine.has_unfinished_requests():
                    answers |= {int(each.request_id): each.outputs[0].token_ids for each in engine.step()}
                found.append([answers[number] for number in sorted(answers)])
    assert found[:2] == found[2:]
    assert found[0] != found[1]
