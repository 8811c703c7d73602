"""Names that a script for vLLM imports, passes and reads; and those that nobody has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import checkpoint_folder, write_text_checkpoint
from transformers import AutoConfig

import spmd_worker
from spmd_worker import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from spmd_worker.base.errors import PromptsRefusedError
from spmd_worker.compat.engine_model_config import PlainConfig

pytestmark = pytest.mark.finding(number="D12")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

# What `vllm` offers in 0.34, and what scripts import from its modules.
VLLM_NAMES = (
    *(
        "LLM",
        "PromptType",
        "TextPrompt",
        "TokensPrompt",
        "EmbedsPrompt",
        "SamplingParams",
        "RequestOutput",
        "CompletionOutput",
    ),
    *("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput"),
    *("ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput", "LLMEngine", "EngineArgs"),
    *("PoolingParams", "__version__", "BeamSearchParams", "GuidedDecodingParams", "StructuredOutputsParams"),
    *("RequestOutputKind", "Logprob"),
)
VLLM_ABSENT = (
    *("ModelRegistry", "AsyncLLMEngine", "AsyncEngineArgs", "initialize_ray_cluster", "DataPrompt"),
    "FlexibleArgumentParser",
)

# The fields of vLLM 0.34's SamplingParams in their order, up to those that a script gives by place.
VLLM_ORDER = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_text_checkpoint(tmp_path_factory.mktemp("text")), num_blocks=300) as made:
        yield made


@pytest.mark.parametrize("name", VLLM_NAMES)
def test_vllm_name_exists(name: str):
    assert getattr(spmd_worker, name) is not None
    assert name.startswith("__") or name in spmd_worker.__all__


@pytest.mark.parametrize("name", VLLM_ABSENT)
def test_missing_vllm_name_error_suggests_an_alternative(name: str):
    with pytest.raises(AttributeError, match=rf"^module 'spmd_worker' .*attribute '{name}': .{{20}}"):
        getattr(spmd_worker, name)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (
            lambda _: spmd_worker.SamplingParam,
            "module 'spmd_worker' has no attribute 'SamplingParam': did you mean Samp",
        ),
        (lambda _: spmd_worker.frobnicate, "module 'spmd_worker' has no attribute 'frobnicate'"),
        (
            lambda _: EngineArgs("a").max_num_seq,
            "EngineArgs has no attribute 'max_num_seq': did you mean ",
        ),
        (lambda _: EngineArgs("a").create_engine_config, "'create_engine_config': give the arguments to LLM.from_eng"),
        (lambda llm: llm.generat, "LLM has no attribute 'generat': did you mean generate?"),
        (lambda llm: llm.llm_engin, "LLM has no attribute 'llm_engin': did you mean llm_engine?"),
        (lambda llm: llm.vllm_config, "LLM has no attribute 'vllm_config': the configuration is llm_engine.config"),
        (lambda llm: llm.llm_engine.abort_requests, "'abort_requests': did you mean abort_request?"),
        (lambda llm: llm.model_config.max_model_length, "'max_model_length': did you mean max_model_len?"),
    ],
)
def test_unknown_attribute_names_the_nearest(llm: LLM, read: Any, words: str):
    with pytest.raises(AttributeError) as refused:
        read(llm)
    assert words in str(refused.value)


def test_unknown_field_of_params_names_the_nearest():
    params = SamplingParams()
    with pytest.raises(AttributeError, match=r"'temprature': .*temperature"):
        params.temprature = 0.5  # type: ignore[attr-defined]  # misspelled


@pytest.mark.parametrize(
    ("call", "owner", "keyword", "end"),
    [
        (lambda _: LLM("a", max_num_seq=2), "LLM", "max_num_seq", ": did you mean max_num_seqs?"),
        (lambda _: SamplingParams(temprature=0), "SamplingParams", "temprature", ": did you mean temperature?"),
        (lambda _: SamplingParams.from_optional(top_q=1), "SamplingParams", "top_q", ": did you mean top_p?"),
        (lambda _: BeamSearchParams(beam_with=3), "BeamSearchParams", "beam_with", ": did you mean beam_width?"),
        (lambda _: PoolingParams(dimension=3), "PoolingParams", "dimension", ": did you mean dimensions?"),
        (lambda _: PoolingParams(softmax=True), "PoolingParams", "softmax", ": its newer name is use_activation"),
        (lambda _: StructuredOutputsParams(jsn={}), "StructuredOutputsParams", "jsn", ": did you mean json?"),
        (
            lambda llm: llm.generate("a", temperature=0),
            "LLM.generate",
            "temperature",
            ": it is a field of SamplingParams: SamplingParams(temperature=...)",
        ),
        (lambda llm: llm.generate("a", use_tqmd=0), "LLM.generate", "use_tqmd", ": did you mean use_tqdm?"),
        (
            lambda llm: llm.generate(prompt_token_ids=[[1]]),
            "LLM.generate",
            "prompt_token_ids",
            ': give prompts, such as [{"prompt_token_ids": ids}]',
        ),
        (lambda llm: llm.chat([], tool=[]), "LLM.chat", "tool", ": did you mean tools?"),
        (lambda llm: llm.embed("a", pool_params=1), "LLM.embed", "pool_params", ": did you mean pooling_params?"),
        (lambda llm: llm.encode("a", pool_task=""), "LLM.encode", "pool_task", ": did you mean pooling_task?"),
        (lambda llm: llm.classify("a", lora=3), "LLM.classify", "lora", ""),
        (lambda llm: llm.score("a", "b", template=""), "LLM.score", "template", ": did you mean chat_template?"),
        (lambda llm: llm.beam_search("a", None, tqdm=1), "LLM.beam_search", "tqdm", ""),
        (lambda llm: llm.sleep(levl=1), "LLM.sleep", "levl", ": did you mean level?"),
        (lambda llm: llm.wake_up(tag=[]), "LLM.wake_up", "tag", ": did you mean tags?"),
        (lambda llm: llm.collective_rpc("a", arg=1), "LLM.collective_rpc", "arg", ": did you mean args?"),
        (lambda llm: llm.weight_update(partly=True), "LLM.weight_update", "partly", ": did you mean partial?"),
        (lambda llm: llm.llm_engine.step(now=1), "LLMEngine.step", "now", ""),
    ],
)
def test_unknown_keyword_names_the_nearest(llm: LLM, call: Any, owner: str, keyword: str, end: str):
    with pytest.raises(TypeError) as refused:
        call(llm)
    assert str(refused.value) == f"{owner} has no keyword {keyword}{end}"


def test_type_errors_within_a_call_are_unchanged(llm: LLM):
    """Negative control."""
    with pytest.raises(TypeError, match=r"^prompts is a int"):
        llm.generate(3, use_tqdm=False)  # type: ignore[arg-type]  # a number
    with pytest.raises(TypeError, match=r"\.generate\(\) missing 1 .*'prompts'"):
        llm.generate()  # type: ignore[call-arg]  # nothing


def test_sampling_params_accept_positional_values():
    values = (2, 0.1, 0.2, 1.3, 0.8, 0.95, 40, 0.05, 7, ["x"], [3], False, 9, 1, 2, 1)
    named = dict(zip(VLLM_ORDER, values, strict=True))
    assert SamplingParams(*values) == SamplingParams(**named) == SamplingParams.from_optional(*values)
    assert SamplingParams(2, 0.0, 0.0, 1.0, 0.8).temperature == 0.8
    assert SamplingParams.from_optional(None, None, temperature=0.5) == SamplingParams(temperature=0.5)
    with pytest.raises(TypeError, match="n is given twice"):
        SamplingParams.from_optional(1, n=2)
    assert SamplingParams.__struct_fields__[: len(VLLM_ORDER)] == VLLM_ORDER
    assert BeamSearchParams(3, 5).beam_width == 3
    assert StructuredOutputsParams(None, "a+").regex == "a+"


def test_prompts_have_the_names_of_vllm(llm: LLM):
    ids = llm.get_tokenizer().encode("hello world")
    given = [
        TextPrompt(prompt="hello world"),
        TokensPrompt(prompt_token_ids=ids),
        TokensPrompt(prompt_token_ids=ids, prompt="said"),
        {"prompt": "hello world", "multi_modal_data": None, "mm_processor_kwargs": {}},
    ]
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    assert [output.outputs for output in outputs] == [outputs[0].outputs] * 4
    assert [output.prompt for output in outputs] == ["hello world", None, "said", "hello world"]
    with pytest.raises(PromptsRefusedError, match=r"this run takes no images"):
        llm.generate({"prompt": "hello", "multi_modal_data": {"image": 1}}, use_tqdm=False)


def test_chat_accepts_positional_arguments_of_vllm(llm: LLM):
    talk = [{"role": "user", "content": "hello"}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (output,) = llm.chat(talk, GREEDY, False, None, template, "string", False, False, None, None)
    assert output.prompt == "<user>hello"


def test_model_config_has_attributes_read_by_scripts(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    config = llm.model_config
    theirs = AutoConfig.from_pretrained(config.model)
    assert config is llm.llm_engine.model_config
    assert config.hf_config.to_dict() == config.hf_text_config.to_dict() == theirs.to_dict()
    assert (config.get_vocab_size(), config.get_hidden_size()) == (theirs.vocab_size, theirs.hidden_size)
    assert (config.get_num_layers(), config.get_head_size()) == (theirs.num_hidden_layers, theirs.head_dim)
    assert config.get_num_attention_heads(None) == theirs.num_attention_heads
    assert config.get_num_kv_heads(None) == config.get_total_num_kv_heads() == theirs.num_key_value_heads
    assert config.max_model_len == llm.llm_engine.max_model_len
    assert config.dtype == torch.float32
    assert (config.architectures, config.runner_type) == (theirs.architectures, "generate")
    assert SamplingParams(**config.get_diff_sampling_param()) == llm.get_default_sampling_params()
    plain = PlainConfig({"vocab_size": 3, "rope": {"theta": 1}})
    assert (plain.vocab_size, plain.rope.theta, plain.to_dict()["rope"]) == (3, 1, {"theta": 1})
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = plain.nothing


def test_model_inspection_names_modules_and_slices(llm: LLM):
    said = llm.get_model_inspection()
    assert said == llm.collective_rpc("get_model_inspection")[0]
    assert "embed_tokens" in said


def test_profile_without_a_folder_is_rejected(llm: LLM):
    with pytest.raises(ValueError, match=r"^start_profile needs .*folder"):
        llm.start_profile()


def test_engine_from_engine_args_has_the_same_class():
    folder = Path(checkpoint_folder("llama3"))
    with LLM(folder, num_blocks=64) as made:
        assert type(made.llm_engine) is spmd_worker.LLMEngine is LLMEngine
