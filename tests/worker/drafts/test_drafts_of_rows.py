"""Drafts depend on the row alone, and those of a head are what it computes for all of a row's tokens at once."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_checkpoints import delta_reference
from draft_checkpoints import (
    EAGLE_TARGET,
    QwenMtpReference,
    add_qwen_head,
    eagle_folder,
    mtp_folder,
    qwen_mtp_folder,
    small_draft_folder,
)
from image_models import PICTURES, image_folder, image_reference, prompt_of, their_stream
from reference_models import checkpoint_folder, mixed_prompts
from torch import Tensor
from transformers import AutoConfig

from spmd_worker import LLM, SamplingParams
from spmd_worker.model.drafts.draft_head import DraftHead
from spmd_worker.model.drafts.mtp import MtpHead
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.worker.drafts.draft_tokens import RowTokens, lay_out
from spmd_worker.worker.drafts.drafting_rows import step_rows
from spmd_worker.worker.drafts.head_drafter import HeadDrafter
from spmd_worker.worker.drafts.model_drafter import ModelDrafter
from spmd_worker.worker.worker import Worker

PROMPTS = [[token_id % 86 + 5 for token_id in prompt] for prompt in mixed_prompts(4, 50, seed=8)]
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=10, ignore_eos=True)
METHODS = ("draft_model", "mtp", "qwen mtp", "eagle3")
MTP_FOLDERS = {"mtp": mtp_folder, "qwen mtp": qwen_mtp_folder}

Drafts = dict[tuple[int, ...], tuple[int, ...]]
"""By the row's tokens."""


def _llm(method: str, **settings: Any) -> LLM:
    folder = MTP_FOLDERS[method]() if method in MTP_FOLDERS else checkpoint_folder(EAGLE_TARGET)
    models = {"draft_model": small_draft_folder, "eagle3": eagle_folder}
    model = str(models[method]()) if method in models else None
    config = {
        "method": method.removeprefix("qwen "),
        "model": model,
        "num_speculative_tokens": 3,
        "max_step_tokens": 999,
    }
    settings = {"num_blocks": 100, "max_model_len": 128, **settings}
    return LLM(str(folder), dtype="float32", speculative_config=config, **settings)


@pytest.fixture
def recorded() -> list[tuple[int, ...]]:
    """Rows of `drafts` in the order of the steps, again each time."""
    return []


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch, recorded: list[tuple[int, ...]]) -> Drafts:
    """Filled by every drafter."""
    found: Drafts = {}
    for drafter in (ModelDrafter, HeadDrafter):
        propose = drafter.propose

        def proposing(
            self: Any,
            scheduled: Sequence[ScheduledSequence],
            sampled: SampledIds,
            *,
            wants_drafts: bool = True,
            propose: Any = propose,
        ) -> Any:
            own = propose(self, scheduled, sampled, wants_drafts=wants_drafts)
            for row in step_rows(scheduled, sampled):
                if row.sampled_ids and own[row.result_index]:
                    tokens = tuple(row.token_ids(0, row.end))
                    recorded.append(tokens)
                    assert found.setdefault(tokens, own[row.result_index]) == own[row.result_index], "another run's"
            return own

        monkeypatch.setattr(drafter, "propose", proposing)
    return found


@pytest.mark.gate("qwen mtp", "eagle3")
@pytest.mark.parametrize("method", METHODS)
def test_drafts_do_not_depend_on_other_rows(method: str, drafts: Drafts, recorded: list[tuple[int, ...]]):
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    with _llm(method) as llm:
        for prompt in prompts:
            llm.generate([prompt], PARAMS, use_tqdm=False)
        alone = list(drafts)
        assert len(alone) > 8
        # From the prefix cache too.
        llm.generate(prompts, PARAMS, use_tqdm=False)
    recorded.clear()
    with _llm(method, max_num_batched_tokens=24, max_num_seqs=24) as llm:
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert len([tokens for tokens in alone if tokens in recorded]) > 8, "rows took other steps"


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_drafts_of_head_are_its_argmax(method: str, drafts: Drafts):
    with _llm(method, max_num_batched_tokens=24, max_num_seqs=24) as llm:
        llm.generate([{"prompt_token_ids": each} for each in PROMPTS[:3]], PARAMS, use_tqdm=False)
        longest = [row for row in drafts if not any(other[: len(row)] == row != other for other in drafts)]
        (expected,) = llm.collective_rpc(lambda worker: [_first_drafts(worker, row) for row in longest])
    checked = 0
    for row, firsts in zip(longest, expected, strict=True):
        for tokens, own in drafts.items():
            if row[: len(tokens)] == tokens:
                # The head reads the last token at the position before.
                assert own[0] == firsts[len(tokens) - 2]
                checked += 1
    assert checked >= len(drafts) > 8


@torch.no_grad()
def test_drafts_of_qwen_are_those_of_transformers(drafts: Drafts):
    """Of a model with states, in chunks and behind drafts that were wrong: every draft of every step."""
    with _llm("qwen mtp", max_num_batched_tokens=24, max_num_seqs=24) as llm:
        llm.generate([{"prompt_token_ids": each} for each in PROMPTS[:3]], PARAMS, use_tqdm=False)
    model, head = delta_reference("qwen3_5"), QwenMtpReference("qwen3_5")
    assert len(drafts) > 8
    for tokens, own in drafts.items():
        hidden = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0][:-1]
        ids, expected = list(tokens[1:]), []
        for _ in own:
            states = head(model.model.embed_tokens(torch.tensor(ids)), hidden)
            expected.append(int(model.lm_head(states[-1]).argmax()))
            ids, hidden = [*ids, expected[-1]], torch.cat((hidden, states[-1:]))
        assert own == tuple(expected)


@pytest.mark.gate("True")
@torch.no_grad()
@pytest.mark.parametrize("takes_media", [True, pytest.param(False, id="control")])
def test_drafts_behind_images_are_those_of_transformers(
    takes_media: bool, drafts: Drafts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The head takes an image's rows and the positions of its tokens, in chunks that end inside an image too; none ends
    before one, of which the head then sees the placeholder.
    """
    monkeypatch.setattr(MtpHead, "takes_media", takes_media)
    folder, text_config = tmp_path / "model", AutoConfig.from_pretrained(image_folder("qwen3_5")).get_text_config()
    shutil.copytree(image_folder("qwen3_5"), folder)
    add_qwen_head(folder, "qwen3_5_images", text_config)
    config = {"method": "mtp", "num_speculative_tokens": 3, "max_step_tokens": 999}
    settings: dict[str, Any] = {"num_blocks": 96, "max_model_len": 192, "max_num_batched_tokens": 25, "max_num_seqs": 8}
    pictures = {1: PICTURES[:1], 2: PICTURES[:2]}
    with LLM(str(folder), dtype="float32", speculative_config=config, **settings) as llm:
        prompts = [prompt_of("qwen3_5", each) for each in pictures.values()]
        outputs = llm.generate(prompts, replace(PARAMS, max_tokens=24), use_tqdm=False)
    model, head = image_reference("qwen3_5"), QwenMtpReference("qwen3_5_images", text_config)
    embed, num_same, num_drafts = model.get_input_embeddings(), 0, 0
    for tokens, own in drafts.items():
        # The row of one picture is the shorter one.
        num_pictures = 1 if tokens[: len(prompt := outputs[0].prompt_token_ids)] == tuple(prompt) else 2
        embedded, hidden, places = their_stream("qwen3_5", pictures[num_pictures], tokens)
        embedded, hidden, places = embedded[1:], hidden[:-1], places[:, :-1]
        for draft in own:
            states = head(embedded, hidden, places)
            found = int(model.lm_head(states[-1]).argmax())
            num_same, num_drafts = num_same + (found == draft), num_drafts + 1
            embedded = torch.cat((embedded, embed(torch.tensor([found]))))
            hidden, places = torch.cat((hidden, states[-1:])), torch.cat((places, places[:, -1:] + 1), dim=1)
    assert num_drafts > 20
    assert (num_same == num_drafts) == takes_media, (num_same, num_drafts)


@torch.inference_mode()
def _first_drafts(worker: Worker, row: tuple[int, ...]) -> list[int]:
    """The likeliest id behind every token of a row but the first, computed at once."""
    loaded, spec = worker.loaded, worker.get_kv_cache_spec()
    head = loaded.draft.module if loaded.draft is not None else None
    assert isinstance(head, DraftHead)
    engine = loaded.new_cache_engine(spec, 16, 0)
    engine.allocate()
    laid_out = lay_out([RowTokens(range(16), 0, len(row) - 1, 0)], spec.block_size, worker.device)
    ids = torch.tensor(row)
    streams: dict[int, Tensor] = dict.fromkeys(head.aux_layers, ids)
    of_tokens = (laid_out.positions, laid_out.regimes)
    hidden = loaded.model(ids[:-1], *of_tokens, engine.layer_caches, laid_out.attention, streams=streams)
    states = head.project(hidden, tuple(streams[layer] for layer in head.aux_layers))
    own = head(ids[1:], laid_out, states, engine.draft_caches)
    engine.release()
    found: list[int] = head.token_ids(head.argmax(own)[1]).tolist()
    return found
