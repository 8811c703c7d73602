"""Weights and logits that are NaN or infinite: rejected at the load, or an error of the affected rows alone.

One token's embedding is NaN: a row that reads it, in the prompt or as its own output, is an error row from there on.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from jobs_of_rows import answers_of_job
from native_builds import HAS_AMX, NATIVE, WITH_AMX, WITHOUT_AMX, library_for
from native_libraries import needs_avx512
from non_finite_rows import FIRST_OF_SECOND_SHARD, GREEDY, SMALL, check, is_told, prompts_around, random_prompts
from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint
from run_folder import made_once
from safetensors.torch import load_file, save_file

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers import embedding
from spmd_worker.native.library import NativeLibrary
from spmd_worker.ops.attention import cpu
from spmd_worker.ops.kernels.cpu import native

PLAIN = WITHOUT_AMX if HAS_AMX else NATIVE


def clean() -> Path:
    spec = CheckpointSpec(LlamaConfig, {"intermediate_size": 128})
    return made_once("non-finite clean", lambda folder: write_checkpoint(folder, spec))


def changed(title: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    def write(folder: Path) -> None:
        shutil.copytree(clean(), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return made_once(f"non-finite {title}", write)


def with_bad_token(token_id: int) -> Path:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][token_id] = torch.nan

    return changed(f"token {token_id}", change)


@pytest.mark.gate("None-float32", "native-bfloat16", "native with emulated AMX-float32")
@pytest.mark.guarantee("Logits that are not finite: that row's error alone")
@pytest.mark.parametrize(
    ("instruction_set", "dtype"),
    [
        pytest.param(WITH_AMX, "bfloat16", marks=needs_avx512),
        (PLAIN, "float32"),
        pytest.param(WITH_AMX, "float32", marks=[needs_avx512, pytest.mark.matrix]),
        pytest.param(PLAIN, "bfloat16", marks=pytest.mark.matrix),
        pytest.param(None, "float32", marks=pytest.mark.matrix),
        pytest.param(None, "bfloat16", marks=pytest.mark.matrix),
    ],
)
def test_non_finite_logits_fail_only_their_row(
    monkeypatch: pytest.MonkeyPatch, instruction_set: str | None, dtype: str
):
    def library() -> NativeLibrary | str:
        return "there is no compiler" if instruction_set is None else library_for(instruction_set)

    for module in (native, cpu):
        monkeypatch.setattr(module, "native_library", library)
    has_kernels = instruction_set is not None
    broken = with_bad_token(FIRST_OF_SECOND_SHARD)
    check(clean(), broken, FIRST_OF_SECOND_SHARD, same_bits=has_kernels, dtype=dtype, **SMALL)


@pytest.mark.control("Logits that are not finite: that row's error alone")
def test_row_test_detects_dependence_on_neighbours(monkeypatch: pytest.MonkeyPatch, control):
    look_up = embedding.VocabularyParallelEmbedding.forward

    def spread(self: embedding.VocabularyParallelEmbedding, *inputs: torch.Tensor | None) -> torch.Tensor:
        rows = look_up(self, *inputs)
        return rows + 0.0 * rows.sum()

    monkeypatch.setattr(embedding.VocabularyParallelEmbedding, "forward", spread)
    with control():
        check(clean(), with_bad_token(FIRST_OF_SECOND_SHARD), FIRST_OF_SECOND_SHARD, **SMALL)


@pytest.mark.gate("tensor_parallel_size")
@pytest.mark.parametrize(
    "layout", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.matrix)]
)
def test_every_rank_says_so_of_the_same_rows(layout: str):
    """The token is the first of the second rank's: what a rank looks up for the tokens of others."""
    source = f"""
        import sys
        from pathlib import Path
        from non_finite_rows import FIRST_OF_SECOND_SHARD, SMALL, check
        check(Path(sys.argv[1]), Path(sys.argv[2]), FIRST_OF_SECOND_SHARD, {layout}=2, **SMALL)
        print("as expected")
        """
    done = ranks.run_ranks(source, 2, 120, [clean(), with_bad_token(FIRST_OF_SECOND_SHARD)]).checked()
    assert done.stdout.count("as expected") == 2


def test_row_that_samples_the_token_ends_after_it():
    prompts = random_prompts(6)
    with LLM(clean(), **SMALL) as llm:
        expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    prompt, written = next(
        (prompt, written)
        for prompt, output in zip(prompts, expected, strict=True)
        for written in [output.outputs[0].token_ids]
        if not {*written[:-1]} & {*prompt}
    )
    with LLM(with_bad_token(written[3]), allow_nonfinite=True, **SMALL) as llm:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert is_told(output, written.index(written[3]) + 1), output


def test_prompt_log_probabilities_are_looked_at_too():
    """The head's weight for one token is NaN, and with it every log-probability of every position."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][9] = torch.nan

    with LLM(changed("head", change), allow_nonfinite=True, **SMALL) as llm:
        asked = [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0), GREEDY]
        outputs = llm.generate([[1, 2, 3], [4, 5, 6]], asked, use_tqdm=False)
    assert [output.error_code for output in outputs] == ["non_finite_logits"] * 2
    assert "token 1 of the prompt" in str(outputs[0].error)
    assert "output token 0 " in str(outputs[1].error)


def test_job_writes_and_counts_error_rows(tmp_path: Path):
    prompts = prompts_around(FIRST_OF_SECOND_SHARD)
    rows = [{"prompt_token_ids": prompt, "temperature": 0, "max_tokens": 3} for prompt in prompts]
    model, options = with_bad_token(FIRST_OF_SECOND_SHARD), {"allow_nonfinite": True}
    answers = answers_of_job(tmp_path, model, rows, dtype="auto", num_blocks=64, options=options)
    codes = [answer["error"] and answer["error"]["code"] for answer in answers]
    assert codes == ["non_finite_logits" if FIRST_OF_SECOND_SHARD in prompt else None for prompt in prompts]
    assert "outputs" not in answers[0]
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert metrics["error_rows"] == 3


@pytest.mark.guarantee("Weights that are not finite are refused")
def test_non_finite_weights_are_rejected_unless_allowed():
    with pytest.raises(
        CheckpointError, match=r"'model\.embed_tokens\.weight' .*nan at \[128, 0\].*allow_nonfinite=True"
    ):
        LLM(with_bad_token(FIRST_OF_SECOND_SHARD), **SMALL)


def test_allowed_new_weights_may_be_non_finite():
    broken = with_bad_token(FIRST_OF_SECOND_SHARD)
    tensors = load_file(broken / "model.safetensors")
    prompts = prompts_around(FIRST_OF_SECOND_SHARD)
    with LLM(broken, allow_nonfinite=True, **SMALL) as llm:

        def answers() -> list[object]:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            return [each.error_code or each.outputs[0].token_ids for each in outputs]

        expected = answers()
        assert "non_finite_logits" in expected
        llm.collective_rpc("reload_weights")
        assert answers() == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(tensors.items())
        assert answers() == expected
        # The form is looked at all the same.
        with pytest.raises(ValueError, match="has the shape"):
            llm.update_weights([("model.norm.weight", torch.full((3,), torch.nan))])
    with LLM(clean(), **SMALL) as llm, pytest.raises(ValueError, match=r"not finite.*allow_nonfinite=True"):
        llm.update_weights(tensors.items())
