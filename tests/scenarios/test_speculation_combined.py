"""Speculation with everything else that a row or an engine may ask for, in combinations drawn by chance."""

import pickle
from dataclasses import asdict, replace
from functools import cache
from random import Random
from typing import Any

import pytest
from adapter_folders import demo_adapters, demo_prompt_adapters
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from planted_drafts import PlantedProposer
from ranks import REPOSITORY
from state_models import state_folder
from stress_seed import SEED

from spmd_worker import LLM, LoRARequest, PromptAdapterRequest, RequestOutput, SamplingParams
from spmd_worker.replica.scheduler import factory
from spmd_worker.replica.sequence.routed_experts import RoutedExperts
from spmd_worker.replica.sequence.sampling_params import StructuredOutputsParams
from spmd_worker.resolved import CHECK_VARIABLE

NUM_ROWS, NUM_CALLED, NUM_ENGINES, MAX_LENGTH = 48, 24, 40, 96
WORDS = ("sort 21 87 57 15 33 12 84 61 =", "reverse h x a f w =", "copy a m v s j l =", "add 31 + 58 =", "copy q =")
MODELS: dict[str, Any] = {
    "demo": lambda: REPOSITORY / "scripts" / "demo" / "model",
    "qwen3_moe": lambda: expert_folder("qwen3_moe"),
    "gemma3": lambda: family_folder("gemma3"),
    "gpt_oss": lambda: expert_folder("gpt_oss"),
    "qwen3_5": lambda: state_folder("qwen3_5"),
    "qwen3_5_moe": lambda: state_folder("qwen3_5_moe"),
}
NUM_IDS = 86
"""Token ids of prompts: below the size of each model's vocabulary."""
Row = tuple[Any, SamplingParams, dict[str, Any]]


def rows_of(name: str) -> list[Row]:
    draw = Random(f"{SEED} {name} rows")
    return [row_of(draw, name, number) for number in range(NUM_ROWS)]


def row_of(draw: Random, name: str, number: int) -> Row:
    is_demo = name == "demo"
    if is_demo and draw.random() < 0.7:
        prompt: Any = draw.choice(WORDS)
    else:
        start = draw.choice([5, 9, 30])
        prompt = {
            "prompt_token_ids": [start + each * each % (NUM_IDS - start) for each in range(draw.choice([1, 7, 16, 33]))]
        }
    options: dict[str, Any] = {"seed": number, "max_tokens": draw.choice([1, 2, 5, 14, 30, 200])}
    options["ignore_eos"] = draw.random() < 0.7
    if draw.random() < 0.5:
        options["temperature"] = draw.choice([0.6, 1.0, 1.5])
        options |= draw.choice([{}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 12}])
    else:
        options["temperature"] = 0.0
    more: list[dict[str, Any]] = [
        {"logprobs": draw.choice([-1, 0, 2])},
        {"return_sampling_mask": True},
        {"logprobs": None, "logprob_token_ids": [7, 5, 60]},
        {"min_tokens": draw.choice([1, 4]), "ignore_eos": False, "max_tokens": 14},
        {"bad_words_ids": ((5,), (7, 9))},
        {"logit_bias": {11: 2.0, 12: -3.0}},
        {"allowed_token_ids": list(range(4, 60))},
        {"stop_token_ids": [draw.randrange(4, 80) for _ in range(6)]},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"prompt_logprobs": 1},
        {"prompt_logprob_token_ids": [5, 6, 7], "prompt_logprob_start": 0},
        {"n": draw.choice([2, 3, 7])},
        {"n": 1, "best_of": 3},
        {"cache_salt": "a"},
    ]
    if name in ("qwen3_moe", "gpt_oss", "qwen3_5_moe"):
        more += [{"return_routed_experts": True}] * 3
    if is_demo:
        more += [
            {"stop": [draw.choice(["1", " ", "a", "2 "])], "include_stop_str_in_output": draw.random() < 0.5},
            {"bad_words": ["1", "a"]},
            {
                "structured_outputs": StructuredOutputsParams(
                    regex=draw.choice(["[a-h ]{6,19}", "(add|sort) [0-9]{2,9}"])
                )
            },
            {"structured_outputs": StructuredOutputsParams(choice=["add 12", "sort it all now", "add 133"])},
        ]
    chosen = {key: value for each in draw.sample(more, draw.choice([0, 1, 1, 2, 3, 4])) for key, value in each.items()}
    options |= chosen
    options["max_tokens"] = max(options["max_tokens"], options.get("min_tokens", 1))
    if "structured_outputs" in options:
        options["ignore_eos"] = False
    if "return_sampling_mask" in options and options["temperature"]:
        options.setdefault("top_p", 0.8)
    with_adapter: dict[str, Any] = {}
    if is_demo and draw.random() < 0.25:
        with_adapter["lora_request"] = LoRARequest(*demo_lora(draw.choice(["one", "two"])))
    elif is_demo and draw.random() < 0.15:
        with_adapter["prompt_adapter_request"] = PromptAdapterRequest(
            "soft", 1, demo_prompt_adapters(soft=6)["soft"], 6
        )
    if with_adapter:
        for key in ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"):
            options.pop(key, None)
    return prompt, SamplingParams(**options), with_adapter


def demo_lora(name: str) -> tuple[str, int, str]:
    return name, ("one", "two").index(name) + 1, demo_adapters(name)[name]


def engine_of(draw: Random, name: str) -> dict[str, Any]:
    """Options that may not change a byte."""
    block_size = draw.choice([2, 4, 4, 16])
    options: dict[str, Any] = {"block_size": block_size}
    least = -(-MAX_LENGTH // block_size) * (3 if name == "gemma3" else 1) + 2
    options["num_blocks"] = draw.choice([least, least, 2 * least, 400])
    options |= draw.choice([{}, {"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.1}])
    options["max_num_seqs"] = draw.choice([3, 8, 16])
    options["max_num_batched_tokens"] = draw.choice([16, 17, 48, 256])
    more: list[dict[str, Any]] = [
        {"async_scheduling": True},
        {"verify_hits": 1},
        {"verify_steps": 1},
        {"enable_prefix_caching": False},
        {"enforce_eager": True},
        {"host_tier_gib": 0.01},
    ]
    for each in draw.sample(more, draw.choice([0, 1, 2])):
        options |= each
    if options.get("enable_prefix_caching") is False:
        options.pop("verify_hits", None)
        options.pop("host_tier_gib", None)
    return options


class ChancyProposer(PlantedProposer):
    """Drafts by a row's seed, which is its number."""

    def __init__(self, answers: dict[int, list[list[int]]], kind: str, vocab_size: int) -> None:
        super().__init__(lambda key, num_outputs, most: (), kind, vocab_size)
        self._answers, self._of = answers, 0
        self._right = self._of_row

    def _of_row(self, key: Any, num_outputs: int, most: int) -> list[int]:
        samples = self._answers[self._of]
        own = samples[key.sample_index] if key.sample_index < len(samples) else []
        return own[num_outputs : num_outputs + most]

    def propose(self, sequence: Any, most: int) -> tuple[int, ...]:
        self._of = sequence.request.sampling.seed
        return super().propose(sequence, most)


def open_llm(name: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 600, "timeout_s": 120.0}
    settings |= {"max_model_len": MAX_LENGTH, "max_num_seqs": 16}
    if name == "demo":
        settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
        settings |= {"enable_prompt_adapter": True, "max_prompt_adapter_token": 8}
    return LLM(MODELS[name](), **{**settings, **options})


def values_of(output: RequestOutput) -> bytes:
    """All that may be compared, bit for bit."""
    fields = asdict(replace(output, metrics=None, request_id="", num_cached_tokens=0))
    return pickle.dumps(plain(fields))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value.hex()
    if hasattr(value, "tobytes"):
        return (value.dtype.str, value.shape, value.tobytes())
    return value if isinstance(value, str | int | None) else repr(value)


def call(llm: LLM, rows: list[Row]) -> list[RequestOutput]:
    adapters = [row[2].get("lora_request") for row in rows]
    prompts = [row[2].get("prompt_adapter_request") for row in rows]
    more = {"lora_request": adapters} if any(adapters) else {}
    more |= {"prompt_adapter_request": prompts} if any(prompts) else {}
    return llm.generate([row[0] for row in rows], [row[1] for row in rows], use_tqdm=False, on_error="row", **more)


@cache
def expected(name: str, head: str | None) -> tuple[list[bytes], dict[int, list[list[int]]]]:
    """Values of each row, and the ids of its samples."""
    rows = rows_of(name)
    with open_llm(name, **head_options(head)) as llm:
        outputs = call(llm, [(prompt, samples_of(params), more) for prompt, params, more in rows])
        ids = {number: [list(each.token_ids) for each in output.outputs] for number, output in enumerate(outputs)}
        return [values_of(each) for each in call(llm, rows)], ids


def samples_of(params: SamplingParams) -> SamplingParams:
    """All samples in their order."""
    return params if params.best_of is None else replace(params, n=params.best_of, best_of=None)


def head_options(head: str | None) -> dict[str, Any]:
    return {} if head is None else {"dtype": "bfloat16", "head_dtype": head}


def combination(number: int) -> None:
    draw = Random(f"{SEED} {number}")
    name = draw.choice(["demo", "demo", *MODELS])
    head = draw.choice([None, None, None, "float32"])
    values, ids = expected(name, head)
    options = engine_of(draw, name)
    kind = draw.choice(["right", "wrong", "chance", "chance", "ngram", "suffix"])
    config = {
        "method": kind if kind in ("ngram", "suffix") else "ngram",
        "num_speculative_tokens": draw.choice([1, 3, 8, 100]),
    }
    config["max_step_tokens"] = draw.choice([8, 40, 200, 1000])
    rows, make = rows_of(name), factory.make_proposer
    if kind not in ("ngram", "suffix"):
        factory.make_proposer = lambda config, vocab_size: ChancyProposer(ids, kind, vocab_size)
    try:
        with open_llm(name, **head_options(head), **options, speculative_config=config) as llm:
            for _ in range(2):
                chosen = [draw.randrange(NUM_ROWS) for _ in range(NUM_CALLED)]
                found = [values_of(each) for each in call(llm, [rows[each] for each in chosen])]
                different = [each for each, value in zip(chosen, found) if value != values[each]]
                shown = [
                    (rows[each], pickle.loads(values[each]), pickle.loads(found[chosen.index(each)]))
                    for each in different[:1]
                ]
                assert not different, (name, head, kind, config, options, different, shown)
            counters = llm.llm_engine.counters
            assert kind != "wrong" or counters.num_accepted_tokens == 0, counters
    finally:
        factory.make_proposer = make


@pytest.mark.stress
@pytest.mark.parametrize("number", range(NUM_ENGINES))
def test_combinations_change_no_byte(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    combination(number)


@pytest.mark.stress
def test_kept_experts_of_wrong_drafts_are_found(monkeypatch: pytest.MonkeyPatch):
    """Negative control: experts of a token stay those of the draft that stood there first."""
    values, ids = expected("qwen3_moe", None)
    put = RoutedExperts.put

    def first_only(experts: RoutedExperts, first: int, tokens: Any, start: int, stop: int) -> None:
        size = experts.token_bytes
        known = bytes(experts.data[first * size :])
        put(experts, first, tokens, start, stop)
        experts.data[first * size : first * size + len(known)] = known

    monkeypatch.setattr(RoutedExperts, "put", first_only)
    monkeypatch.setattr(factory, "make_proposer", lambda config, vocab_size: ChancyProposer(ids, "wrong", vocab_size))
    rows = rows_of("qwen3_moe")
    with open_llm("qwen3_moe", speculative_config={"method": "ngram", "max_step_tokens": 200}) as llm:
        found = [values_of(each) for each in call(llm, rows)]
    different = [number for number in range(NUM_ROWS) if found[number] != values[number]]
    assert different
    assert all(rows[number][1].return_routed_experts for number in different)
