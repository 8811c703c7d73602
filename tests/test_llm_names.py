"""`LLM` as scripts for vLLM use it: arguments of its calls, what outputs carry, the tokenizer, the metrics."""

import builtins
import inspect
import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from content_templates import WALKING
from context_fixtures import fixture_of
from reference_models import checkpoint_folder, mixed_prompts, write_text_checkpoint
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.methods import ENGINE_METHODS, LLM_ABSENT, LLM_METHODS
from spmd_worker.compat.script_tokenizer import PlainTokenizer
from spmd_worker.replica.sequence.step import StepPlan

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = mixed_prompts(5, 40, seed=3)
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]

llm = fixture_of(lambda: LLM(checkpoint_folder("llama3"), num_blocks=300))


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_text_checkpoint(tmp_path_factory.mktemp("text")), num_blocks=300) as made:
        yield made


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# Arguments of calls.


def test_arguments_that_ask_for_nothing_change_nothing(llm: LLM):
    expected = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    nothing = (
        *({"lora_request": None}, {"lora_request": [None] * 5}, {"priority": [0] * 5}, {"priority": None}),
        *({"priority": 0}, {"tokenization_kwargs": {}}, {"mm_processor_kwargs": None}),
    )
    for extra in nothing:
        assert token_ids(llm.generate(PROMPTS, sampling_params=GREEDY, use_tqdm=False, **extra)) == expected


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lora_request": [None, None]}, "2 lora requests for 5 prompts"),
        ({"priority": [1, 0, 0, 0, 0]}, "^priority=[13] needs scheduling_policy=priority"),
        ({"tokenization_kwargs": {"a": 1}}, "tokenization_kwargs={'a': 1}"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs={'a': 1}"),
        ({"priority": [0]}, r"priority=\[0\] must .*of 5\b"),
        ({"priority": True}, r"priority=True must .*of 5\b"),
        ({"priority": 3}, "^priority=[13] needs scheduling_policy=priority"),
    ],
)
def test_unsupported_arguments_are_rejected(llm: LLM, extra: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, **extra)
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 5


def test_chat_accepts_neutral_priority(text_llm: LLM):
    for priority in (None, 0, [0]):
        assert len(text_llm.chat(TALK, GREEDY, use_tqdm=False, priority=priority)) == 1
    with pytest.raises(ValueError, match=r"^priority=[13] needs scheduling_policy=priority"):
        text_llm.chat(TALK, GREEDY, use_tqdm=False, priority=1)


def test_reset_prefix_cache_takes_vllm_arguments(llm: LLM):
    assert llm.reset_prefix_cache(True, reset_connector=True)
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    for call in (llm.reset_prefix_cache, engine.reset_prefix_cache):
        with pytest.raises(ValueError, match="reset_running_requests=True"):
            call(reset_running_requests=True)
        call(reset_connector=True)
    while engine.has_unfinished_requests():
        engine.step()
    assert llm.reset_prefix_cache(reset_running_requests=True)


def test_progress_bar_may_be_the_callers(llm: LLM, capfd: pytest.CaptureFixture[str]):
    made: list[Any] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    llm.generate(PROMPTS, GREEDY, use_tqdm=partial(Bar, leave=False, mininterval=0))
    (bar,) = made
    assert (bar.n, bar.total, bar.leave) == (5, 5, False)
    assert "5/5" in capfd.readouterr().err
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert (len(made), capfd.readouterr().err) == (1, "")


class TornBar(tqdm):
    """Raises where its class says."""

    torn = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self.torn == "making":
            raise OSError("no bar")
        super().__init__(*args, **kwargs)

    def update(self, n: float | None = 1) -> bool | None:
        if self.torn == "update":
            raise OSError("no bar")
        return super().update(n)

    def close(self) -> None:
        # Python, too, calls it, of an object that is gone.
        if self.torn == "close" and self.n:
            self.torn = ""
            raise OSError("no bar")
        super().close()


@pytest.mark.parametrize("torn", ["making", "update", "close"])
def test_failing_progress_bar_is_logged(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, torn: str
):
    """The engine ended: of several ranks the first alone has a bar."""
    expected = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    monkeypatch.setattr(TornBar, "torn", torn)
    assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=TornBar)) == expected
    assert [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("spmd_worker.engine.calls.progress_bar")
    ] == ["use_tqdm: the progress bar failed; the call continues without it"]
    assert "no bar" in caplog.text


def test_progress_bar_factory_may_return_none(llm: LLM):
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=lambda **_: None)) == 5


@pytest.mark.parametrize("use_tqdm", [None, 1, "yes"])
def test_invalid_use_tqdm_is_rejected(llm: LLM, use_tqdm: Any):
    with pytest.raises(TypeError, match=r"use_tqdm is a \w+"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=use_tqdm)


# What outputs carry.


def test_outputs_have_vllm_fields_and_uncompared_metrics(llm: LLM):
    llm.reset_prefix_cache()
    first, again = (llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False) for _ in range(2))
    for output in first:
        assert (output.finished, output.lora_request, output.encoder_prompt) == (True, None, None)
        (completion,) = output.outputs
        assert completion.finished()
        assert completion.lora_request is None
        metrics = output.metrics
        assert metrics is not None
        assert metrics.num_generation_tokens == 6
        assert metrics.arrival_time > 1e9
        times = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        assert times == sorted(times)
        assert times[0] > 0
        assert metrics.first_token_latency >= 0
    assert token_ids(first) == token_ids(again)
    assert first[0].metrics != again[0].metrics
    llm.reset_prefix_cache()
    assert llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False) == first


def test_request_is_scheduled_before_its_first_step(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Regression: executors that compute at once had computed the prompt, whose time counted as waiting."""
    executor, began_s = llm.llm_engine.executor, list[float]()
    execute = executor.execute_model

    def timed(plan: StepPlan, **named: Any) -> Any:
        if plan.has_rows:
            began_s.append(time.monotonic())
        return execute(plan, **named)

    monkeypatch.setattr(executor, "execute_model", timed)
    (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.scheduled_ts <= began_s[0] <= output.metrics.first_token_ts


def test_metrics_cover_samples_and_aborted_requests(llm: LLM):
    (several,) = llm.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert several.metrics is not None
    assert several.metrics.num_generation_tokens == 12
    engine = llm.llm_engine
    number = engine.add_request(PROMPTS[0], GREEDY)
    engine.abort_request(number)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (aborted,) = outputs
    assert aborted.metrics is not None
    assert (aborted.metrics.num_generation_tokens, aborted.metrics.queued_ts > 0) == (0, True)


def test_metrics_have_vllm_names_and_grow(llm: LLM):
    def read() -> dict[str, float]:
        metrics = llm.get_metrics()
        return {each.labels.get("finished_reason", each.name): each.value for each in metrics}

    before = read()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = read()
    grown = {name: after[name] - before[name] for name in before}
    assert [grown[reason] for reason in ("stop", "length", "abort", "error")] == [0, 5, 0, 0]
    assert grown["vllm:generation_tokens"] == 30
    assert grown["vllm:prompt_tokens"] == sum(map(len, PROMPTS))
    assert grown["vllm:prefix_cache_queries"] == grown["vllm:prompt_tokens"] > grown["vllm:prefix_cache_hits"]
    uncached = SamplingParams(temperature=0, max_tokens=2, skip_reading_prefix_cache=True)
    llm.generate(PROMPTS, uncached, use_tqdm=False)
    assert read()["vllm:prefix_cache_queries"] == after["vllm:prefix_cache_queries"]
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0.0
    engine = llm.llm_engine
    engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    engine.step()
    assert read()["vllm:num_requests_running"] == 1
    assert read()["vllm:kv_cache_usage_perc"] > 0
    while engine.has_unfinished_requests():
        engine.step()
    assert llm.get_world_size() == 1


# Conversations.

TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "strips": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
    "tools": (
        "{{ tools | tojson if tools else 'none' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
        "{% if thinks %}<think>{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "parts": (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}</s>{% endfor %}"
    ),
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]}]


def prompt_of(llm: LLM, messages: Any, **options: Any) -> str:
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **options)
    assert output.error is None, output.error
    assert output.prompt is not None
    assert output.prompt_token_ids == llm.llm_engine.need_tokenizer().encode(output.prompt, add_special_tokens=False)
    return output.prompt


@pytest.mark.parametrize("content", ["hi", "hi ", " hi  \n", "hi </s> there"])
@pytest.mark.parametrize("name", ["plain", "strips", "parts"])
def test_continue_final_message_equals_transformers(text_llm: LLM, name: str, content: str):
    talk = [TALK[0], {"role": "assistant", "content": content}]
    options = {"chat_template": TEMPLATES[name], "continue_final_message": True, "add_generation_prompt": False}
    expected = text_llm.get_tokenizer().apply_chat_template(talk, tokenize=False, **options)
    assert prompt_of(text_llm, talk, **options) == expected
    # Negative control: closed, it is another prompt.
    assert prompt_of(text_llm, talk, **options | {"continue_final_message": False}) != expected


def test_parts_of_the_last_message_are_continued_too(text_llm: LLM):
    options = {"chat_template": TEMPLATES["parts"], "continue_final_message": True, "add_generation_prompt": False}
    expected = text_llm.get_tokenizer().apply_chat_template(PARTS, tokenize=False, **options)
    for content_format in ("openai", "auto"):
        assert prompt_of(text_llm, PARTS, chat_template_content_format=content_format, **options) == expected
    assert prompt_of(text_llm, PARTS, chat_template_content_format="string", **options) == "<user>one\ntwo "


def test_tools_templates_and_variables_reach_the_prompt(text_llm: LLM):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    parsed = [TALK[0], {**talk[1], "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}]}]
    given = {"chat_template": TEMPLATES["tools"], "tools": TOOLS}
    theirs = text_llm.get_tokenizer().apply_chat_template
    expected = theirs(parsed, tokenize=False, add_generation_prompt=True, thinks=True, **given)
    assert prompt_of(text_llm, talk, chat_template_kwargs={"thinks": True}, **given) == expected
    assert talk[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert prompt_of(text_llm, TALK, chat_template=TEMPLATES["tools"]).startswith("none<user>hello")
    assert prompt_of(text_llm, TALK, tools=[], chat_template=TEMPLATES["tools"]).startswith("none")


def test_text_parts_follow_content_format(text_llm: LLM):
    given = {"chat_template": TEMPLATES["parts"]}
    for content_format, expected in (("string", "one\ntwo "), ("openai", "[one][two ]"), ("auto", "[one][two ]")):
        found = prompt_of(text_llm, PARTS, chat_template_content_format=content_format, **given)
        assert found == f"<user>{expected}</s>"
    hello = [{"role": "user", "content": "hello"}]
    walking = {"chat_template": WALKING["a macro"], "chat_template_content_format": "openai"}
    assert prompt_of(text_llm, hello, **walking) == "<user>hello;"
    assert "one\ntwo" in prompt_of(text_llm, PARTS)


@pytest.mark.finding(number="A1")
@pytest.mark.parametrize("name", ["SmolVLM", "LLaVA", "a macro"])
def test_texts_reach_a_template_that_walks_over_parts(text_llm: LLM, name: str):
    given = {"chat_template": WALKING[name], "add_generation_prompt": True}
    expected = text_llm.get_tokenizer().apply_chat_template(PARTS, tokenize=False, **given)
    assert prompt_of(text_llm, PARTS, **given) == expected
    for text in ("one", "two " * 50):
        strings, parts = ([{"role": "user", "content": each}] for each in (text, [{"type": "text", "text": text}]))
        expected = text_llm.get_tokenizer().apply_chat_template(parts, tokenize=False, **given)
        assert text.strip() in expected
        assert prompt_of(text_llm, strings, **given) == prompt_of(text_llm, parts, **given) == expected


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "this run takes no images: the model (LlamaForCausalLM) runs with text alone",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0] needs input_audio, and nothing else"),
        ({"role": "user", "content": 3}, "messages[0].content=3 must be a string or a list of parts"),
        (
            {"rol": "user", "content": "x"},
            "messages[0].role=None must be a string such as 'user': it has 'rol': did you",
        ),
        ({"role": 1, "content": "x"}, "messages[0].role=1 must be a string such as 'user'"),
        ({"role": "user"}, "messages[0] has no content"),
        ({"role": "user", "Content": "x"}, "messages[0] has no content: it has 'Content': did you mean content?"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments='{' must be an object, or one as JSON",
        ),
    ],
)
def test_non_text_message_is_an_error(text_llm: LLM, message: Any, words: str):
    for content_format in ("auto", "openai"):
        bad, good = text_llm.chat(
            [[message], TALK], GREEDY, use_tqdm=False, on_error="row", chat_template_content_format=content_format
        )
        assert words in (bad.error or "")
        assert good.error is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"continue_final_message": True}, "pass add_generation_prompt=False with it"),
        ({"chat_template_content_format": "list"}, r"chat_template_content_format='list' must .*auto"),
        ({"lora_request": [None, None]}, "2 lora requests for 1 prompt:"),
        ({"messages": [TALK, []]}, "prompt 1: messages is empty: a conversation needs at least one message"),
        ({"messages": [TALK, 5]}, "prompt 1: messages is a int: give a list of messages"),
    ],
)
def test_invalid_chat_options_are_rejected(text_llm: LLM, options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        text_llm.chat(**{"messages": TALK, "sampling_params": GREEDY, "use_tqdm": False, **options})
    flags = ({"add_generation_prompt": 5}, {"continue_final_message": "no"})
    for wrong in (*flags, {"tools": {}}, {"chat_template": 3}, {"chat_template_kwargs": []}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} is a "):
            text_llm.chat(TALK, GREEDY, use_tqdm=False, **wrong)


def test_template_dropping_last_message_cannot_continue_it(text_llm: LLM):
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for talk, template in ((TALK, "{{ messages[0].content }}"), ([TALK[0], {"role": "assistant"}], None)):
        (output,) = text_llm.chat(talk, GREEDY, use_tqdm=False, chat_template=template, on_error="row", **options)
        assert "continue_final_message=True, but the" in (output.error or "")


def test_chat_template_may_be_text_or_file(tmp_path: Path, text_llm: LLM):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES["plain"])
    folder = text_llm.llm_engine.resolved.model_folder
    for given in (TEMPLATES["plain"], str(file), file):
        with LLM(folder, num_blocks=300, chat_template=given) as llm:
            assert prompt_of(llm, TALK[:1]) == "<user>hello</s>"
            assert prompt_of(llm, TALK[:1], chat_template=TEMPLATES["tools"]).startswith("none<user>hello")
    with pytest.raises(ConfigError, match="chat_template='nowhere'"):
        LLM(folder, chat_template="nowhere")
    for long in ("x" * 100_000, "x\0"):
        with pytest.raises(ConfigError, match=r"^chat_template='x.* neither .*nor") as refused:
            LLM(folder, chat_template=long)
        assert len(str(refused.value)) < 400


@pytest.mark.finding(number="A2")
def test_tools_without_template_support_are_logged(text_llm: LLM, caplog: pytest.LogCaptureFixture):
    words = "the chat template does not read tools"
    for template, is_said in ((TEMPLATES["plain"], True), (TEMPLATES["tools"], False)):
        caplog.clear()
        text_llm.chat([TALK, TALK], GREEDY, use_tqdm=False, tools=TOOLS, chat_template=template)
        assert caplog.text.count(words) == is_said


@pytest.mark.finding(number="A2")
def test_chat_selects_template_by_tools_or_name(tmp_path: Path, text_llm: LLM):
    folder = shutil.copytree(text_llm.llm_engine.resolved.model_folder, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    sources = {"default": TEMPLATES["plain"], "tool_use": f"tools: {TEMPLATES['tools']}", "rag": "{{ documents[0] }}"}
    config["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(folder)
    for chat_template in (None, "rag"):
        with LLM(folder, num_blocks=300, chat_template=chat_template) as llm:
            for given in ({}, {"tools": TOOLS}, {"chat_template": "rag"}, {"chat_template": "tool_use"}):
                named = {"chat_template": chat_template, **given}
                expected = theirs.apply_chat_template(TALK, tokenize=False, documents=[{"text": "d"}], **named)
                options = {"add_generation_prompt": False, "chat_template_kwargs": {"documents": [{"text": "d"}]}}
                assert prompt_of(llm, TALK, **options, **given) == expected, named
            assert llm.get_tokenizer().chat_template == PlainTokenizer(llm.llm_engine.need_tokenizer()).chat_template


# The tokenizer.


def test_get_tokenizer_is_transformers_own_if_installed(text_llm: LLM):
    tokenizer = text_llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert text_llm.get_tokenizer() is tokenizer
    own = text_llm.llm_engine.need_tokenizer()
    for text in ("hello world", "naïve café 你好", ""):
        assert tokenizer.encode(text) == own.encode(text)
    rendered = tokenizer.apply_chat_template(conversation=TALK, tokenize=False, add_generation_prompt=True)
    (output,) = text_llm.chat(TALK, GREEDY, use_tqdm=False)
    assert output.prompt == rendered


@pytest.mark.usefixtures("no_transformers")
def test_get_tokenizer_without_transformers_has_its_methods(tmp_path: Path, text_llm: LLM):
    theirs = text_llm.get_tokenizer()
    with LLM(text_llm.llm_engine.resolved.model_folder, num_blocks=300) as llm:
        ours = llm.get_tokenizer()
    assert isinstance(ours, PlainTokenizer)
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    ids = ours.encode("hello world")
    assert ours("hello world") == {name: theirs("hello world")[name] for name in ("input_ids", "attention_mask")}
    assert ours(["hello", "world"])["input_ids"] == theirs(["hello", "world"])["input_ids"]
    special = [*ids, theirs.eos_token_id]
    for skip in (False, True):
        assert ours.decode(special, skip_special_tokens=skip) == theirs.decode(special, skip_special_tokens=skip)
        assert ours.batch_decode([ids, special], skip_special_tokens=skip) == theirs.batch_decode(
            [ids, special], skip_special_tokens=skip
        )
    assert ours.decode(ids[0]) == theirs.decode(ids[0])
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(theirs.convert_ids_to_tokens(ids)) == ids
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert ours.all_special_ids == theirs.all_special_ids
    for template in (None, "{{ messages[0].content }}|{{ bos_token }}{{ extra }}"):
        given = {"chat_template": template, "add_generation_prompt": True, "extra": "x"}
        for tokenize in (False, True):
            expected = theirs.apply_chat_template(TALK, tokenize=tokenize, **given)
            expected = expected["input_ids"] if tokenize else expected
            assert ours.apply_chat_template(TALK, tokenize=tokenize, **given) == expected
    with pytest.raises(AttributeError, match=r"'padding_side'.*transformers"):
        _ = ours.padding_side
    left_open = {"continue_final_message": True, "tokenize": False}
    assert ours.apply_chat_template(TALK, **left_open) == theirs.apply_chat_template(TALK, **left_open)


def test_a_folder_that_transformers_cannot_open_gives_ours(text_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoTokenizer

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise ValueError("this tokenizer needs code")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with LLM(text_llm.llm_engine.resolved.model_folder, num_blocks=300) as llm:
        assert isinstance(llm.get_tokenizer(), PlainTokenizer)


def test_a_model_without_a_tokenizer_says_so(llm: LLM):
    with pytest.raises(ConfigError, match="prompt_token_ids"):
        llm.get_tokenizer()


# Methods.


def test_llm_methods_keep_signature_and_docstring(llm: LLM):
    """They are methods of objects in engine/calls/, which a script does not see."""
    for name in LLM_METHODS:
        method = getattr(LLM, name)
        assert (method.__module__, method.__qualname__) == ("spmd_worker.llm", f"LLM.{name}")
        assert method.__doc__
    given = inspect.signature(llm.generate)
    assert list(given.parameters)[:3] == ["prompts", "sampling_params", "use_tqdm"]
    assert given.parameters["on_error"].default == "raise"
    assert "PromptsRefusedError" in str(LLM.generate.__doc__)
    assert list(inspect.signature(LLM.weight_update).parameters) == ["self", "partial"]


def test_vllm_methods_exist_or_name_alternatives(llm: LLM):
    for name in LLM_METHODS:
        assert callable(getattr(llm, name)), name
    for name in ENGINE_METHODS:
        assert callable(getattr(llm.llm_engine, name)), name
    for name, words in LLM_ABSENT.items():
        assert not hasattr(llm, name), f"{name} is here now: take it out of LLM_ABSENT"
        with pytest.raises(AttributeError) as refused:
            getattr(llm, name)
        assert str(refused.value) == f"LLM has no attribute {name!r}: {words}"
    with pytest.raises(AttributeError, match=r"^LLM .*attribute 'frobnicate'$"):
        _ = llm.frobnicate
