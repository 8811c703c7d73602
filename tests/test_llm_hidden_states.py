"""`LLM.extract_hidden_states` against transformers, and as a head reads them."""

import pytest
import ranks
import torch
from reference_models import checkpoint_folder, mixed_prompts, reference_model, relative_error

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError

NAME = "llama_four_layers"
PROMPTS = mixed_prompts(4, 40, seed=12)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@torch.no_grad()
def test_hidden_states_equal_transformers(monkeypatch: pytest.MonkeyPatch):
    prompts, layers = [{"prompt_token_ids": each} for each in PROMPTS], (0, 2, 4)
    with LLM(str(checkpoint_folder(NAME)), dtype="float32", max_num_batched_tokens=32, max_num_seqs=32) as llm:
        answers = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
        # In chunks, and not from the prefix cache.
        found = llm.extract_hidden_states(prompts, layers)
        assert [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)] == answers
        for given, words in (([], "must be numbers"), ([5], "from 0 to 4"), ([-1], "from 0 to 4")):
            with pytest.raises(ValueError, match=words):
                llm.extract_hidden_states(prompts, given)
        for given, words in ((2, "layer_ids=2 is a int: give a list"), ([1, 1.5], r"layer_ids\[1\]=1\.5 is a float")):
            with pytest.raises(TypeError, match=words):
                llm.extract_hidden_states(prompts, given)
        # As with workers in other processes, to which no tensor goes: their failure would end the engine.
        monkeypatch.delattr(llm.llm_engine.executor, "driver_worker")
        with pytest.raises(ConfigError, match="workers in other processes: use one stage"):
            llm.extract_hidden_states(prompts, layers)
        monkeypatch.undo()
    model = reference_model(NAME)
    captured: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0][0]))
    for prompt, states in zip(PROMPTS, found, strict=True):
        captured.clear()
        outputs = model.model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
        theirs = torch.stack([outputs.hidden_states[0][0], outputs.hidden_states[2][0], captured[0]], dim=1)
        assert relative_error(states, theirs) < 1e-5
    hook.remove()


@pytest.mark.matrix
def test_hidden_states_need_all_layers():
    script = """
    import sys
    from spmd_worker import LLM
    from spmd_worker.base.errors import ConfigError
    with LLM(sys.argv[1], dtype="float32", pipeline_parallel_size=2) as llm:
        try:
            llm.extract_hidden_states([{"prompt_token_ids": [7, 8]}], [1])
        except ConfigError as error:
            assert "needs all layers" in str(error)
        else:
            raise AssertionError("a stage has some layers")
    """
    assert ranks.run_ranks(script, 2, 120, [checkpoint_folder(NAME)]).returncode == 0
