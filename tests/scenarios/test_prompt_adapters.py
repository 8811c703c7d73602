"""Prompt adapters equal PEFT's, share blocks by their content alone, and change no other row."""

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from exact_answers import ids_and_entries
from json_files import edit
from layouts_of_two import on_two_ranks
from safetensors.torch import load_file, save_file

from spmd_worker import LLM, BeamSearchParams, LoRARequest, PromptAdapterRequest, PromptsRefusedError, SamplingParams
from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.sequence import prompt_adapter_request
from spmd_worker.worker.runner.prefix_store import PrefixStore

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
KINDS = [("prompt", 20), ("p", 16), ("prefix", 20)]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46], [9], list(range(60, 90)), list(range(60, 90)), [5, 6, 7, 8]]
PARAMS = [
    SamplingParams(temperature=1, seed=1, max_tokens=40, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, max_tokens=3, n=2, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=3, repetition_penalty=1.2, max_tokens=20, logprobs=1, ignore_eos=True),
    GREEDY,
    GREEDY,
]
PLACES = [0, 1, 2, None, 2, 0]
"""The adapter of each prompt."""
SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 14,
    "max_model_len": 104,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
}


def requests_of(folders: list[Path]) -> list[PromptAdapterRequest]:
    return [
        PromptAdapterRequest(kind, index, str(folder), num_tokens)
        for index, (folder, (kind, num_tokens)) in enumerate(zip(folders, KINDS), start=1)
    ]


def answer(llm: LLM, places: list[int], requests: list[PromptAdapterRequest]) -> list[Any]:
    """Answers of these prompts, in one call."""
    return ids_and_entries(
        llm.generate(
            [PROMPTS[place] for place in places],
            [PARAMS[place] for place in places],
            prompt_adapter_request=[None if PLACES[place] is None else requests[PLACES[place]] for place in places],
            use_tqdm=False,
        )
    )


@pytest.fixture(scope="module")
def folders(model: Path) -> list[Path]:
    from prompt_adapter_folders import prompt_adapter_folder

    return [prompt_adapter_folder(model, *kind) for kind in KINDS]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, dtype="float32", **SMALL) as made:
        yield made
        made.llm_engine.scheduler.check_integrity()
        assert made.llm_engine.scheduler.cache.num_used_blocks == 0


def num_computed(llm: LLM, prompt: list[int], request: PromptAdapterRequest) -> int:
    """Tokens that a greedy answer of one token computes."""
    before = llm.llm_engine.counters.num_computed_tokens
    llm.generate([prompt], replace(GREEDY, max_tokens=1), prompt_adapter_request=request, use_tqdm=False)
    return llm.llm_engine.counters.num_computed_tokens - before


@pytest.mark.gate("gpt2-prompt-5", "llama3-prefix-20", "granite-prefix-5", "gemma2-prompt-20", "llama3-p-16")
@pytest.mark.guarantee("prompt adapters compute what PEFT computes")
@pytest.mark.parametrize(
    ("base", "kind", "num_tokens"),
    [
        *(("llama3", *kind) for kind in KINDS),
        *(("gemma2", *kind) for kind in KINDS[:1]),
        *((family, kind, 5) for family in ("gpt2", "granite") for kind in ("prompt", "prefix")),
    ],
)
def test_answers_equal_those_of_peft(base: str, kind: str, num_tokens: int):
    from family_checkpoints import family_folder
    from prompt_adapter_folders import prompt_adapter_folder, tuned_greedy, tuned_model
    from reference_models import checkpoint_folder

    folder = checkpoint_folder(base) if base == "llama3" else family_folder(base)
    reference, prompt = tuned_model(folder, kind, num_tokens), [5, 6, 7, 8, 9, 10, 11]
    ids, logprobs = tuned_greedy(reference, prompt, 8)
    request = PromptAdapterRequest("one", 1, str(prompt_adapter_folder(folder, kind, num_tokens)), num_tokens)
    with LLM(folder, device="cpu", dtype="float32", num_blocks=64, block_size=8) as made:
        for _ in range(2):
            (output,) = made.generate([prompt], GREEDY, prompt_adapter_request=request, use_tqdm=False)
            assert output.outputs[0].token_ids == ids
            ours = torch.tensor([each[token].logprob for token, each in zip(ids, output.outputs[0].logprobs)])
            assert (ours - logprobs).abs().max() < 1e-4
        assert output.prompt_token_ids == prompt


@pytest.mark.control("prompt adapters compute what PEFT computes")
def test_comparison_with_peft_detects_exchanged_keys(monkeypatch: pytest.MonkeyPatch):
    """Negative control: keys in place of values."""
    keep = PrefixStore.keep
    monkeypatch.setattr(PrefixStore, "keep", lambda store, content, tensor: keep(store, content, tensor.flip(1)))
    with pytest.raises(AssertionError):
        test_answers_equal_those_of_peft("llama3", "prefix", 20)


def test_rows_keep_their_bits_beside_others(llm: LLM, folders: list[Path]):
    requests = requests_of(folders)
    alone = []
    for place in range(len(PROMPTS)):
        llm.reset_prefix_cache()
        alone += answer(llm, [place], requests)
    before = llm.llm_engine.counters.num_preemptions
    assert answer(llm, [0, 1, 2, 3, 4, 5], requests) == alone
    assert llm.llm_engine.counters.num_preemptions > before
    assert answer(llm, [5, 4, 3, 2, 1, 0], requests) == alone[::-1]
    plain = llm.generate([PROMPTS[4]], GREEDY, use_tqdm=False)
    assert [[one.token_ids, [[*each.items()] for each in one.logprobs]] for one in plain[0].outputs] != alone[4]


@pytest.mark.guarantee("a virtual prefix is computed once an adapter")
def test_virtual_prefix_is_computed_once(llm: LLM, folders: list[Path]):
    tuned, encoded, prefixed = requests_of(folders)
    llm.reset_prefix_cache()
    # Two full blocks; then rows compute their own tokens alone.
    assert [num_computed(llm, prompt, encoded) for prompt in ([5, 6], [7, 8, 9], [10])] == [18, 3, 1]
    # The last 4 of 20 tokens are in the block where the prompt begins.
    assert [num_computed(llm, prompt, tuned) for prompt in ([5, 6], [7, 8, 9])] == [22, 7]
    # Given keys and values are computed for no row.
    assert [num_computed(llm, prompt, prefixed) for prompt in ([5, 6], [7, 8, 9])] == [2, 3]


@pytest.mark.control("a virtual prefix is computed once an adapter")
def test_count_detects_prefix_computed_for_each_row(llm: LLM, folders: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Negative control: a request's own number in the names of its blocks."""
    from spmd_worker.replica.scheduler import allocator

    given_rows, numbers = allocator.GivenRows, itertools.count()

    def named(content: bytes, *place: int) -> Any:
        return given_rows(next(numbers).to_bytes(16, "big"), *place)

    monkeypatch.setattr(allocator, "GivenRows", named)
    with pytest.raises(AssertionError):
        test_virtual_prefix_is_computed_once(llm, folders)
    llm.reset_prefix_cache()


@pytest.mark.guarantee("blocks of a prompt adapter are found by its content alone")
def test_other_content_never_finds_old_blocks(llm: LLM, folders: list[Path], tmp_path: Path):
    _, request, prefixed = requests_of(folders)
    prompt = list(range(100, 111))
    for given in (request, prefixed):
        llm.reset_prefix_cache()
        first = num_computed(llm, prompt, given)
        assert num_computed(llm, prompt, given) < first
        # Equal content has the same blocks, under any id and name.
        same = PromptAdapterRequest(
            "same", 7, str(shutil.copytree(folders[given.adapter_id - 1], tmp_path / "same")), 16
        )
        same = replace(same, prompt_adapter_num_virtual_tokens=given.prompt_adapter_num_virtual_tokens)
        assert num_computed(llm, prompt, same) < first
        # Other content under the same id and name has none.
        assert llm.remove_prompt_adapter(7)
        file = tmp_path / "same/adapter_model.safetensors"
        save_file({name: each + 1e-3 for name, each in load_file(file).items()}, file)
        assert num_computed(llm, prompt, same) == first
        assert llm.remove_prompt_adapter(7)
        shutil.rmtree(tmp_path / "same")


@pytest.mark.control("blocks of a prompt adapter are found by its content alone")
def test_blocks_without_content_are_found_wrongly(
    llm: LLM, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Negative control: one name for all adapters."""
    from spmd_worker.replica.scheduler import allocator

    given_rows = allocator.GivenRows
    monkeypatch.setattr(allocator, "GivenRows", lambda content, *place: given_rows(bytes(16), *place))
    with pytest.raises(AssertionError):
        test_other_content_never_finds_old_blocks(llm, folders, tmp_path)
    llm.reset_prefix_cache()
    llm.remove_prompt_adapter(7)


def test_virtual_tokens_are_not_reported(llm: LLM, model: Path, folders: list[Path]):
    from prompt_adapter_folders import tuned_model

    prompt = [5, 6, 7, 8]
    for place, request in ((0, requests_of(folders)[0]), (2, requests_of(folders)[2])):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([prompt], params, prompt_adapter_request=request, use_tqdm=False)
        assert (output.prompt_token_ids, output.num_cached_tokens) == (prompt, 0)
        reference = tuned_model(model, *KINDS[place])
        with torch.no_grad():
            theirs = reference(torch.tensor([prompt]), use_cache=place == 2).logits[0].log_softmax(-1)
        # PEFT's logits of prompt tuning have virtual positions, those of prefix tuning have not.
        theirs = theirs[-len(prompt) :]
        assert output.prompt_logprobs[0] is None
        for index, token in enumerate(prompt[1:]):
            assert abs(output.prompt_logprobs[index + 1][token].logprob - float(theirs[index, token])) < 1e-4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"peft_type": "MULTITASK_PROMPT_TUNING"},
            "'MULTITASK_PROMPT_TUNING' is not supported: its rows",
        ),
        ({"peft_type": "CPT"}, "'CPT' is not supported: context-aware"),
        ({"peft_type": "LORA"}, "give it as lora_request"),
        ({"peft_type": "IA3"}, "prompt adapters are PROMPT_TUNING, P_TUNING, PREFIX_TUNING"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "encoder-decoder"),
        ({"num_virtual_tokens": 21}, "has 20 rows, but num_virtual_tokens is 21"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "PREFIX_TUNING"}, "keys and values of 64 numbers a token, not the 192 of this model"),
    ],
)
def test_unsupported_folders_are_refused(
    llm: LLM, folders: list[Path], tmp_path: Path, config: dict[str, Any], reason: str
):
    folder = shutil.copytree(folders[0], tmp_path / "changed")
    edit(folder / "adapter_config.json", **config)
    with pytest.raises(AdapterError, match=reason):
        llm.add_prompt_adapter(PromptAdapterRequest("changed", 9, str(folder), 20))
    assert 9 not in llm.list_prompt_adapters()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"prompt_embeddings": torch.full((20, 64), torch.nan)}, "not finite"),
        ({"prompt_embeddings": torch.zeros(20, 63)}, "rows of 63 numbers, the model's have 64"),
        ({"other": torch.zeros(20, 64)}, "one tensor, prompt_embeddings"),
        (None, "has no adapter_model.safetensors: save the adapter with save_pretrained"),
    ],
)
def test_invalid_tensors_are_refused(llm: LLM, folders: list[Path], tmp_path: Path, tensors: Any, reason: str):
    folder = shutil.copytree(folders[0], tmp_path / "changed")
    (folder / "adapter_model.safetensors").unlink()
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=reason):
        llm.add_prompt_adapter(PromptAdapterRequest("changed", 9, str(folder), 20))


def test_invalid_requests_are_refused(llm: LLM, folders: list[Path]):
    tuned = requests_of(folders)[0]
    for fields in ({"prompt_adapter_id": 0}, {"prompt_adapter_name": ""}, {"prompt_adapter_num_virtual_tokens": 0}):
        with pytest.raises(ValueError, match=f"PromptAdapterRequest.{next(iter(fields))}"):
            replace(tuned, **fields)
    with pytest.raises(TypeError, match="prompt_adapter_request='a' is a str"):
        llm.generate([[1]], prompt_adapter_request="a", use_tqdm=False)
    with pytest.raises(AdapterError, match="has 20 virtual tokens, and the request says"):
        llm.add_prompt_adapter(replace(tuned, prompt_adapter_id=9, prompt_adapter_num_virtual_tokens=19))
    llm.add_prompt_adapter(tuned)
    with pytest.raises(AdapterError, match="has 20 virtual tokens"):
        llm.generate([[1]], prompt_adapter_request=replace(tuned, prompt_adapter_num_virtual_tokens=19), use_tqdm=False)
    with pytest.raises(AdapterError, match="is loaded as 'prompt'"):
        llm.generate([[1]], prompt_adapter_request=replace(tuned, prompt_adapter_name="other"), use_tqdm=False)
    with pytest.raises(PromptsRefusedError, match="20 virtual and 84 tokens but max_model_len is 104"):
        llm.generate([[1] * 84], GREEDY, prompt_adapter_request=tuned, use_tqdm=False)
    assert llm.generate([[1] * 83], GREEDY, prompt_adapter_request=tuned, use_tqdm=False)[0].outputs[0].token_ids


def test_chat_beams_and_scores_take_prompt_adapters(llm: LLM, folders: list[Path]):
    """A beam of width 1 is the greedy answer, and scores of an answer are its log-probabilities."""
    tuned, _, prefixed = requests_of(folders)
    given, prompts = [tuned, None, prefixed], [PROMPTS[0], PROMPTS[0], PROMPTS[0]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY, prompt_adapter_request=given)]
    ids = [output.token_ids for output in outputs]
    assert len({str(each) for each in ids}) == 3
    one = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    assert [each.sequences[0].tokens for each in llm.beam_search(asked, one, prompt_adapter_request=given)] == [
        [*PROMPTS[0], *each] for each in ids
    ]
    scores = llm.score_tokens(prompts, ids, prompt_adapter_request=given)
    assert scores == [
        [each[token].logprob for token, each in zip(output.token_ids, output.logprobs)] for output in outputs
    ]
    # Virtual tokens leave beams less room.
    long = {"prompt_token_ids": [1] * 82}
    (found,) = llm.beam_search([long], one, prompt_adapter_request=tuned)
    assert len(found.sequences[0].tokens) == 84
    with pytest.raises(ValueError, match="20 virtual and 84 tokens but max_model_len is 104"):
        llm.beam_search([{"prompt_token_ids": [1] * 84}], one, prompt_adapter_request=tuned)
    with pytest.raises(TypeError, match="prompt_adapter_request='a' is a str"):
        llm.score_tokens([[1]], [[2]], prompt_adapter_request="a")


def test_adapters_give_way_in_order_of_use(model: Path, folders: list[Path]):
    first, second, third = requests_of(folders)
    with LLM(model, dtype="float32", max_prompt_adapters=2, **SMALL) as made:
        assert made.add_prompt_adapter(first)
        assert made.add_prompt_adapter(second)
        num_computed(made, [5], first)
        assert made.add_prompt_adapter(third)
        assert made.list_prompt_adapters() == made.llm_engine.executor.list_prompt_adapters() == {1, 3}
        assert made.pin_prompt_adapter(1)
        assert made.pin_prompt_adapter(3)
        with pytest.raises(AdapterError, match=r"^2 prompt adapters are loaded, 2 of them .*max_prompt_adapters is 2"):
            made.add_prompt_adapter(second)
        engine = made.llm_engine
        engine.add_request("a", [5, 6], GREEDY, prompt_adapter_request=first)
        with pytest.raises(AdapterError, match=r"^prompt adapter 1 .* cannot be removed: 1 request with it is"):
            engine.remove_prompt_adapter(1)
        while engine.has_unfinished_requests():
            engine.step()
        assert made.remove_prompt_adapter(1)
        assert not made.remove_prompt_adapter(1)
        assert made.list_prompt_adapters() == {3}
        store = engine.executor.driver_worker.model_runner
        assert (store.rows.num_bytes, store.prefixes.num_bytes) == (0, 20 * 192 * 4)
        with pytest.raises(AdapterError, match="cannot be pinned"):
            made.pin_prompt_adapter(1)


def test_adapters_are_loaded_again_after_a_restart(
    model: Path, folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tuned, encoded, prefixed = requests_of(folders)
    own = replace(encoded, prompt_adapter_local_path=str(shutil.copytree(folders[1], tmp_path / "own")))
    with LLM(model, dtype="float32", **SMALL) as made:
        expected = answer(made, [0, 2, 5], [tuned, encoded, prefixed])
        made.add_prompt_adapter(own)
        made.pin_prompt_adapter(3)
        (tmp_path / "own" / "adapter_model.safetensors").write_bytes(b"")
        made.reinitialize_distributed()
        assert made.list_prompt_adapters() == made.llm_engine.executor.list_prompt_adapters() == {1, 3}
        assert "prompt adapter 2 ('p') is not loaded any more: rank 0: " in caplog.text
        entries = made.llm_engine.scheduler.prompt_adapters.entries
        assert [(each.name, each.is_pinned, each.num_tokens) for each in entries.values()] == [
            ("prompt", False, 20),
            ("prefix", True, 20),
        ]
        with pytest.raises(AdapterError, match="has 20 virtual tokens"):
            made.generate([[1]], prompt_adapter_request=replace(tuned, prompt_adapter_num_virtual_tokens=19))
        shutil.rmtree(tmp_path / "own")
        assert answer(made, [0, 2, 5], [tuned, encoded, prefixed]) == expected
        assert made.llm_engine.prompt_adapters.of_name("prompt").num_tokens == 20


def test_content_of_digest_is_read_back():
    virtual = prompt_adapter_request.VirtualTokens(2**63 - 1, 5)
    assert prompt_adapter_request.digest_in(virtual.rows) == virtual.digest


def combined(llm: LLM, lora: Path, requests: list[PromptAdapterRequest], places: list[int]) -> list[Any]:
    """Answers of these rows, in one call, each a LoRA adapter, a prompt adapter and embeddings, or fewer of them."""
    rows = torch.randn(11, 64, generator=torch.Generator().manual_seed(5))
    loras = [LoRARequest("lora", 1, str(lora)), None]
    prompts = [{"prompt_embeds": rows}, {"prompt_token_ids": PROMPTS[1]}]
    given = [(prompt, adapter, tuned) for prompt in prompts for adapter in loras for tuned in (*requests, None)]
    asked = [given[place] for place in places]
    outputs = llm.generate(
        [prompt for prompt, _, _ in asked],
        [PARAMS[place % 2] for place in places],
        lora_request=[adapter for _, adapter, _ in asked],
        prompt_adapter_request=[tuned for _, _, tuned in asked],
        use_tqdm=False,
    )
    return [[one.token_ids, [[*each.items()] for each in one.logprobs]] for each in outputs for one in each.outputs]


COMBINED = list(range(16))


def main_combined(model: Path, folder: Path, names: list[str], **layout: Any) -> None:
    """Compares rows in one call with each alone, and writes a rank's answers to a file."""
    lora, *others = [Path(name) for name in names]
    requests = requests_of(others)
    with LLM(model, **SMALL, **layout, enable_lora=True) as made:
        mixed = combined(made, lora, requests, COMBINED)
        made.reset_prefix_cache()
        alone = [*itertools.chain(*[combined(made, lora, requests, [place]) for place in COMBINED])]
        assert len({str(each) for each in alone}) == len(COMBINED)
        assert mixed == alone
        assert mixed[::-1] == combined(made, lora, requests, COMBINED[::-1])
        made.pin_prompt_adapter(2)
        made.reinitialize_distributed(**layout)
        engine = made.llm_engine
        assert engine.executor.list_prompt_adapters() == {1, 2, 3}
        assert [each.is_pinned for each in engine.scheduler.prompt_adapters.entries.values()] == [False, True, False]
        assert mixed == combined(made, lora, requests, COMBINED)
        (folder / str(made.llm_engine.engine_channel.rank)).write_text(json.dumps(mixed))


def main(model: Path, folder: Path, names: list[str], **layout: Any) -> None:
    """Writes a rank's report to a file."""
    requests = requests_of([Path(name) for name in names])
    with LLM(model, **SMALL, **layout) as made:
        rank = made.llm_engine.engine_channel.rank
        seen: list[Any] = [answer(made, [0, 1, 2, 3, 4, 5], requests), made.llm_engine.counters.num_preemptions]
        own = folder.parent / f"cut{rank}"
        shutil.copytree(names[0], own)
        if rank == 1:
            file = own / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
        try:
            made.add_prompt_adapter(PromptAdapterRequest("cut", 9, str(own), 20))
        except AdapterError as error:
            seen.append(str(error))
        seen += [sorted(made.list_prompt_adapters()), answer(made, [5, 4], requests)]
        (folder / str(rank)).write_text(json.dumps(seen))


@on_two_ranks
def test_prompt_adapters_on_ranks(model: Path, folders: list[Path], layout: dict[str, int], tmp_path: Path):
    (tmp_path / "out").mkdir()
    command = [__file__, "main", json.dumps(layout), model, tmp_path / "out", *folders]
    ranks.run_forked(command, 2, timeout_s=240).checked()
    first, second = (json.loads(path.read_text()) for path in sorted((tmp_path / "out").iterdir()))
    assert first[:1] + first[2:] == second[:1] + second[2:]
    answers, num_preemptions, problem, loaded, again = first
    assert num_preemptions or layout != {"tensor_parallel_size": 2}
    assert problem.startswith("rank 1: ")
    assert "truncated" in problem
    assert loaded == [1, 2, 3]
    assert again == [answers[5], answers[4]]
    with LLM(model, **SMALL) as made:
        alone = json.loads(json.dumps(answer(made, [0, 1, 2, 3, 4, 5], requests_of(folders))))
    if layout != {"tensor_parallel_size": 2}:
        assert answers == alone
    assert [[ids for ids, _ in row] for row in answers] == [[ids for ids, _ in row] for row in alone]


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_lora_prompt_adapter_and_embeddings_combine_on_ranks(
    model: Path, folders: list[Path], kind: str, tmp_path: Path
):
    from adapter_folders import write_adapter

    given = [write_adapter(tmp_path / "lora", model, 3), *folders]
    (tmp_path / "here").mkdir()
    main_combined(model, tmp_path / "here", list(map(str, given)))
    (tmp_path / "out").mkdir()
    layout = json.dumps({f"{kind}_parallel_size": 2})
    ranks.run_forked([__file__, "main_combined", layout, model, tmp_path / "out", *given], 2, timeout_s=240).checked()
    here = json.loads((tmp_path / "here/0").read_text())
    first, second = (json.loads(path.read_text()) for path in sorted((tmp_path / "out").iterdir()))
    assert first == second
    if kind != "tensor":
        assert first == here


if __name__ == "__main__":
    program = {"main": main, "main_combined": main_combined}[sys.argv[1]]
    program(Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:], **json.loads(sys.argv[2]))
