"""Answers of models whose weights stay as files store them are those of dequantised ones, bit for bit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from adapter_folders import write_adapter
from gguf import GGUFReader
from safetensors.torch import save_file
from stored_checkpoints import GGUF_ARCHITECTURES, write_gguf_of, write_stored, write_stored_gguf

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import CheckpointError
from spmd_worker.ranks.stored_weights import NOTHING_STORED, find_stored_panels
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import weights_bytes

pytestmark = pytest.mark.usefixtures("own_hub_cache")

LIMIT_S = 120.0
KINDS = ("gptq", "awq", "w4a16", "mxfp4", "nf4", "fp8_dense", "fp8_shared", "fp8_whole", "gguf", "gguf_experts")
KINDS_ON_RANKS = ("awq", "mxfp4", "fp8_shared", "gguf")
"""Whole numbers and floats, of dense layers, experts and a shared one."""
MIXES: tuple[dict[str, str], ...] = (
    {"0.attn_v": "Q6_K", "0.ffn_down": "Q6_K"},
    {"attn_v": "Q5_K", "blk": "IQ4_XS"},
    {"ffn_down": "Q5_0", "attn_v": "Q8_0", "blk": "Q4_0"},
    {"0.ffn_up": "F16", "1.attn_q": "BF16", "0.ffn_down": "Q3_K"},
)
"""Types of tensors in files of each architecture, the others of Q4_K: real mixes, and some plain tensors."""
PROMPTS = [[7 * token % 61 + 3 for token in range(length)] for length in (3, 17, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "num_blocks": 64, "max_model_len": 64}

ON_EACH_RANK = """
    import json, os, sys
    from pathlib import Path
    from test_stored_weights import SETTINGS, answers, num_held
    from spmd_worker import LLM

    folder, *models = sys.argv[1:]
    found = []
    for model in models:
        for dequantises in (False, True):
            options = {"tensor_parallel_size": 2, "dequantize_weights": dequantises, "max_num_seqs": 4}
            with LLM(model, **SETTINGS, **options) as llm:
                found.append([num_held(llm), answers(llm)])
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


def answers(llm: LLM, **options: Any) -> list[Any]:
    """Ids of each row, and the logprobs of each of its tokens."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, **options)
    found = [output.outputs[0] for output in outputs]
    return [
        [list(each.token_ids), [[[key, one.logprob] for key, one in of.items()] for of in each.logprobs or ()]]
        for each in found
    ]


def num_held(llm: LLM) -> int:
    """Weights of this rank that are held as stored."""
    model = llm.llm_engine.executor.driver_worker.model_runner.model
    return sum(each.dtype == torch.uint8 for each in model.parameters())


@pytest.mark.guarantee("Weights that stay as stored give the answers of dequantised ones")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_as_stored_answer_as_dequantised(tmp_path: Path, kind: str):
    """Files say float16 and the dtype is the default: they were computed in float32, dequantised."""
    folder, settings = write_stored(tmp_path / kind, kind, dtype="float16"), SETTINGS | {"dtype": "auto"}
    with LLM(folder, **settings) as llm:
        # Two matrices of each expert, and four of a dense layer.
        shared = 4 + 4 * 2 + 4
        of_kind = {"mxfp4": 2 * 4 * 2, "awq": shared, "fp8_shared": shared, "gguf_experts": 2 * (2 + 2 * 4 + 2)}
        assert num_held(llm) == of_kind.get(kind, 2 * 4)
        llm.check_weights()
        found = answers(llm), llm.weights_digest()
    with LLM(folder, **settings, dequantize_weights=True) as llm:
        assert num_held(llm) == 0
        assert (answers(llm), llm.weights_digest()) == found


@pytest.mark.stress
@pytest.mark.guarantee("Weights that stay as stored give the answers of dequantised ones")
@pytest.mark.parametrize("types", MIXES, ids=lambda types: "-".join(types.values()))
@pytest.mark.parametrize("name", GGUF_ARCHITECTURES)
def test_gguf_of_each_architecture_answers_as_dequantised(tmp_path: Path, name: str, types: dict[str, str]):
    """Of as many bytes as are planned, after each sleep too."""
    path, found = write_gguf_of(GGUF_ARCHITECTURES[name], tmp_path / name, types), []
    for dequantises in (False, True):
        with LLM(path, **SETTINGS, dequantize_weights=dequantises) as llm:
            assert (num_held(llm) > 0) is not dequantises
            model = llm.llm_engine.executor.driver_worker.model_runner.model
            tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
            stored = find_stored_panels(model.model_config, RankLayout(1)) if num_held(llm) else NOTHING_STORED
            planned = weights_bytes(model.model_config, RankLayout(1), 0, "bfloat16", "cpu", stored=stored)
            assert planned == sum(each.nbytes for each in tensors.values())
            before = answers(llm)
            for level in (1, 2):
                llm.reset_prefix_cache()
                llm.sleep(level=level)
                llm.wake_up()
                if level == 2:
                    llm.collective_rpc("reload_weights")
                assert answers(llm) == before
            found.append((before, llm.weights_digest()))
    assert found[0] == found[1]


@pytest.mark.control("Weights that stay as stored give the answers of dequantised ones")
@pytest.mark.parametrize(("kind", "name"), [("gptq", "mlp.down_proj"), ("gguf", "self_attn.o_proj")])
def test_comparison_sees_one_zero_point(tmp_path: Path, kind: str, name: str):
    """Negative control: a zero point of a held weight, or the factor of a minimum, changes logprobs."""
    folder = write_stored(tmp_path / kind, kind)
    with LLM(folder, **SETTINGS) as llm:
        before, model = answers(llm), llm.llm_engine.executor.driver_worker.model_runner.model
        packed = model.model.layers[0].get_submodule(name).weight.data
        # Behind the head, the numbers of 192 or 256 inputs in lines of 128, and 64 bytes of the first group.
        packed[0, 0, 64 + 256 * 8 + 64] ^= 7
        assert answers(llm) != before


@pytest.mark.matrix
@pytest.mark.parametrize("kinds", [KINDS_ON_RANKS, pytest.param(KINDS, marks=pytest.mark.stress)], ids=["some", "all"])
def test_two_ranks_answer_as_with_dequantised_weights(tmp_path: Path, kinds: Sequence[str]):
    folders = [write_stored(tmp_path / kind, kind) for kind in kinds]
    ranks.run_ranks(ON_EACH_RANK, 2, LIMIT_S, [tmp_path, *folders]).checked()
    of_ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for found in of_ranks:
        for kind, (held, held_answers), (dequantised, expected) in zip(kinds, found[::2], found[1::2], strict=True):
            assert held > dequantised == 0, kind
            assert held_answers == expected == of_ranks[0][2 * kinds.index(kind)][1], kind


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gptq", pytest.param("gguf", marks=pytest.mark.stress)])
def test_adapters_and_drafts_take_stored_weights(tmp_path: Path, kind: str):
    folder, adapted_shapes = write_stored(tmp_path / kind, kind), ADAPTED[kind]
    # Adapters are written for plain files, by names and shapes.
    names = [
        (f"model.layers.{index}.{name}.weight", shape) for index in (0, 1) for name, shape in adapted_shapes.items()
    ]
    save_file({name: torch.zeros(shape) for name, shape in names}, tmp_path / "plain.safetensors")
    targets = [name.rpartition(".")[2] for name in adapted_shapes]
    adapter = str(write_adapter(tmp_path / "adapter", tmp_path, 1, targets))
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    found = []
    for dequantises in (False, True):
        options = {**SETTINGS, "dequantize_weights": dequantises}
        with LLM(folder, **options, adapters={"a": adapter}) as llm:
            assert (num_held(llm) > 0) is not dequantises
            adapted = answers(llm, lora_request=LoRARequest("a", 1, adapter))
            plain = answers(llm)
            assert adapted != plain
        with LLM(folder, **options, lora_merge=adapter) as llm:
            # A weight that is added to is no file's.
            assert num_held(llm) == 0
            merged = answers(llm)
            assert merged != plain
        with LLM(folder, **options, speculative_config=draft) as llm:
            found.append((adapted, merged, answers(llm)))
            assert found[-1][2] == plain
    assert found[0] == found[1]


def test_runs_in_4_bits_refuse_other_weights(tmp_path: Path):
    """Files alone replace them, after a deep sleep too."""
    folder, state = write_stored(tmp_path / "gptq", "gptq"), tmp_path / "state"
    with LLM(folder, **SETTINGS) as llm:
        before, name = answers(llm), "model.layers.1.self_attn.o_proj.weight"
        with pytest.raises(CheckpointError, match=r"held in 4-bit integers in groups of 32.*dequantize_weights=True"):
            llm.update_weights([(name, torch.zeros(128, 128))])
        llm.save_sharded_state(state)
        with pytest.raises(CheckpointError, match=r"sharded state has dequantised weights.*dequantize_weights=True"):
            llm.collective_rpc("reload_weights", args=(str(state),))
        llm.reset_prefix_cache()
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert answers(llm) == before


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_gguf_is_replaced_where_formats_hold_its_types(tmp_path: Path):
    """Types of another file are held exactly in the formats of the first one, or refused with the way out."""
    files = [write_stored_gguf(tmp_path, "gguf", seed, **types) for seed, types in OTHER_TYPES]
    with LLM(files[0], **SETTINGS) as llm:
        before = answers(llm)
        for other in files[1:3]:
            llm.reset_prefix_cache()
            llm.collective_rpc("reload_weights", args=(str(other),))
            llm.check_weights(str(other))
            with LLM(other, **SETTINGS, dequantize_weights=True) as theirs:
                found = answers(llm)
                assert found == answers(theirs) != before
        with pytest.raises(
            CheckpointError, match=r"Q8_0/m\.gguf: .*o_proj.weight is Q8_0, which 4-bit .* do not hold: "
        ):
            llm.collective_rpc("reload_weights", args=(str(files[3]),))
        assert answers(llm) == found
        # A step that is infinite.
        content = bytearray(files[2].read_bytes())
        (begin,) = (
            each.data_offset for each in GGUFReader(files[2]).tensors if each.name == "blk.0.attn_output.weight"
        )
        content[begin : begin + 2] = b"\x00\x7c"
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(content)
        for load in (
            lambda: LLM(damaged, **SETTINGS),
            lambda: llm.collective_rpc("reload_weights", args=(str(damaged),)),
        ):
            with pytest.raises(CheckpointError, match=r"/damaged\.gguf: .*o_proj.weight' has (inf|nan)"):
                load()


@pytest.mark.parametrize("kind", ["awq", "mxfp4", "gguf"])
def test_weights_in_4_bits_are_saved_dequantised(tmp_path: Path, kind: str):
    """To the byte the files of a run that dequantises them; answers of saved models are those of the run."""
    folder, files = write_stored(tmp_path / kind, kind), []
    for dequantises in (False, True):
        checkpoint, state = (tmp_path / f"{name}{dequantises}" for name in ("checkpoint", "state"))
        with LLM(folder, **SETTINGS, dequantize_weights=dequantises) as llm:
            assert (num_held(llm) > 0) is not dequantises
            expected = answers(llm)
            llm.save_checkpoint(checkpoint)
            llm.save_sharded_state(state)
        saved = sorted(path for each in (checkpoint, state) for path in each.iterdir())
        files.append({path.name: path.read_bytes() for path in saved})
    assert files[0] == files[1]
    with LLM(checkpoint, **SETTINGS) as llm:
        assert answers(llm) == expected


OTHER_TYPES: Any = ((0, {}), (1, {}), (2, {"0.attn_q": "Q5_0"}), (3, {"0.attn_output": "Q8_0"}))
"""Seeds and types of tensors: layer 0 has queries, keys and values in 8 bits anyway."""
ADAPTED = {
    "gptq": {"self_attn.q_proj": (128, 128), "mlp.up_proj": (192, 128), "mlp.down_proj": (128, 192)},
    "gguf": {"self_attn.q_proj": (256, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)},
}
"""Outputs and inputs of modules by kind."""
