"""vLLM's own offline examples, with the line that imports it changed: their calls in their order, on a tiny model.

    examples/offline_inference/{basic/basic, basic/chat, prefix_caching, torchrun_example, rlhf_colocate}.py

Written after vLLM 0.11. Where an example prints, what it would print is compared.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file

MODEL = str(ranks.REPOSITORY / "scripts" / "demo" / "model")
EXTRA: dict[str, Any] = {"device": "cpu", "num_blocks": 64}
PROMPTS = ["sort 21 87 57 =", "reverse h x a f w =", "add 3 4 =", "copy a b c ="]


def basic() -> list[str]:
    from spmd_worker import LLM, SamplingParams

    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL, **EXTRA)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    return [output.outputs[0].text for output in outputs]


def chat() -> list[str]:
    from spmd_worker import LLM, EngineArgs

    args: dict[str, Any] = vars(EngineArgs(model=MODEL, **EXTRA))
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 8
    sampling_params.temperature = 0.0
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "add 3 4 ="},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    batched = llm.chat([conversation for _ in range(10)], sampling_params, use_tqdm=True)
    assert {output.outputs[0].text for output in batched} == {outputs[0].outputs[0].text}
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    templated = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
    return [outputs[0].outputs[0].text, templated[0].outputs[0].text]


def prefix_caching() -> list[str]:
    from spmd_worker import LLM, SamplingParams

    prefix = "sort 21 87 57 15 33 12 84 61 = 12 15 21 33 57 61 84 87 "
    generating_prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model=MODEL, gpu_memory_utilization=0.4, **EXTRA)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular = [output.outputs[0].text for output in outputs]
    del regular_llm
    prefix_cached_llm = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4, **EXTRA)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    assert min(output.num_cached_tokens for output in outputs) > 0
    assert [output.outputs[0].text for output in outputs] == regular
    return regular


class ColocateWorkerExtension:
    device: torch.device

    def report_device_id(self) -> str:
        return str(self.device)


def rlhf_colocate() -> list[str]:
    from spmd_worker import LLM, SamplingParams

    llm = LLM(
        model=MODEL,
        enforce_eager=True,
        worker_extension_cls=f"{__name__}.ColocateWorkerExtension",
        dtype="float32",
        **EXTRA,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8)
    before = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    assert llm.collective_rpc("report_device_id", args=()) == ["cpu"]
    weights = load_file(os.path.join(MODEL, "model.safetensors"))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    llm.update_weights(zeros.items())
    llm.reset_prefix_cache()
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, params)] != before
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights(weights.items())
    llm.wake_up(tags=["kv_cache"])
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, params)] == before
    return before


@pytest.mark.matrix
@pytest.mark.parametrize("example", [chat, prefix_caching, rlhf_colocate])
def test_vllm_example_runs(example: Any):
    assert all(example())


@pytest.mark.matrix
def test_sampling_example_is_reproducible():
    assert basic() == basic()


TORCHRUN = f"""
    import torch.distributed as dist
    from spmd_worker import LLM, SamplingParams

    prompts = {PROMPTS * 2!r}
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(
        model={MODEL!r}, tensor_parallel_size=2, distributed_executor_backend="external_launcher", max_model_len=128,
        seed=1, **{EXTRA!r},
    )
    outputs = llm.generate(prompts, sampling_params)
    # All ranks have the same outputs.
    texts = [output.outputs[0].text for output in outputs]
    gathered = [None, None]
    dist.all_gather_object(gathered, texts)
    assert gathered[0] == gathered[1]
    if dist.get_rank() == 0:
        for output in outputs:
            print(f"Prompt: {{output.prompt!r}}")
            print(f"Generated text: {{output.outputs[0].text!r}}")
    # As the example says they can be had.
    assert llm.llm_engine.model_executor.driver_worker.worker.model_runner.model is not None
    """


@pytest.mark.matrix
def test_torchrun_example_runs_on_two_ranks(tmp_path: Path):
    done = ranks.run_ranks(TORCHRUN, 2, 240.0, []).checked()
    assert done.stdout.count("Generated text: ") == 8
