"""Draft heads against straight-line transcriptions of their definitions, in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from draft_checkpoints import (
    EAGLE_TARGET,
    QwenMtpReference,
    eagle_folder,
    eagle_tensors,
    mtp_folder,
    qwen_mtp_folder,
)
from family_checkpoints import family_folder
from quantised_files import quantise
from reference_models import checkpoint_folder, open_reference, random_prompt, reference_model, relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model.drafts.draft_head import DraftHead
from spmd_worker.model.drafts.eagle3 import embedding_store
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.backend import block_shape_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.resolved import resolve_run, with_draft
from spmd_worker.worker.drafts.draft_tokens import RowTokens, lay_out
from spmd_worker.worker.loaded_draft import LoadedDraft
from spmd_worker.worker.memory.draft_memory import draft_weights_bytes
from spmd_worker.worker.memory.estimate import block_layer, rank_layers
from spmd_worker.worker.worker import Worker

BLOCK_SIZE = 16
PROMPT = random_prompt(41, seed=2, vocab_size=96)
TOLERANCE = 1e-5


def _loaded(folder: Path, method: str, model: Path | None = None) -> LoadedDraft:
    config = RunConfig(model=ModelOptions(path=str(folder), dtype="float32"), device="cpu")
    resolved = with_draft(resolve_run(config, "cpu"), method, None if model is None else str(model), 3)
    worker = Worker(resolved, RankEnvironment())
    worker.init_device()
    worker.load_model()
    draft = worker.loaded.draft
    assert draft is not None
    assert draft.num_bytes == draft_weights_bytes(resolved, 0), "the plan counts what is loaded"
    return draft


@torch.inference_mode()
def _ours(draft: LoadedDraft, hidden: Tensor, aux: tuple[Tensor, ...], chunk: int) -> tuple[Tensor, Tensor]:
    """States, and those of a second application, of the tokens of PROMPT but the first, `chunk` at a time."""
    head, num_tokens = draft.module, len(PROMPT) - 1
    assert isinstance(head, DraftHead)
    ((layer, share),) = rank_layers(draft.draft.model_config, draft.draft.layout, 0)
    kept = block_layer(layer, share, BLOCK_SIZE)
    assert kept is not None
    shape = block_shape_of(draft.attention, kept, BLOCK_SIZE)
    cache = torch.full((1, 4, *shape), torch.nan)
    given = head.project(hidden, aux)
    ids, parts = torch.tensor(PROMPT[1:]), []
    for first in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - first)
        laid_out = lay_out([RowTokens([2, 0, 3], first, count, 0)], BLOCK_SIZE, torch.device("cpu"))
        own = slice(first, first + count)
        parts.append(head(ids[own], laid_out, given[own], cache))
    states = torch.cat(parts)
    laid_out = lay_out([RowTokens([2, 0, 3], num_tokens, 1, 0)], BLOCK_SIZE, torch.device("cpu"))
    return states, head(torch.tensor([77]), laid_out, states[-1:], cache)


def check_head(
    folder: Path,
    hidden: Tensor,
    states_of: Callable[[list[int], Tensor], Tensor],
    norm: Callable[[Tensor], Tensor],
) -> Tensor:
    """Check states, a second draft and argmax of a folder's head against its definition, whose states it returns."""
    theirs = states_of(PROMPT[1:], hidden)
    second = states_of([*PROMPT[1:], 77], torch.cat((hidden, theirs[-1:])))[-1:]
    draft = _loaded(folder, "mtp")
    for chunk in (len(PROMPT), 7):
        ours, again = _ours(draft, hidden, (), chunk)
        assert relative_error(ours, theirs) < TOLERANCE
        assert relative_error(again, second) < TOLERANCE
    values, columns = draft.module.argmax(ours)
    logits = norm(theirs) @ load_file(folder / "model.safetensors")["lm_head.weight"].T
    assert relative_error(values, logits.max(dim=-1).values) < TOLERANCE
    assert columns.tolist() == logits.argmax(dim=-1).tolist()
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm4_moe"])
def test_mtp_layer_equals_its_definition(name: str):
    folder = mtp_folder(name)
    config = AutoConfig.from_pretrained(folder)
    # The layer is the fourth of a model of four layers.
    config.num_hidden_layers += 1
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    deeper = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    number = config.num_hidden_layers - 1
    tensors = load_file(folder / "model.safetensors")
    own = {name: tensors[f"model.layers.{number}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
    norm = tensors[f"model.layers.{number}.shared_head.norm.weight"]
    target = open_reference(folder)
    hidden = target.model(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0][:-1]

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, config.rms_norm_eps)

    def states_of(ids: list[int], given: Tensor) -> Tensor:
        embedded = rms(target.model.embed_tokens(torch.tensor(ids)), own["enorm"])
        x = torch.cat((embedded, rms(given, own["hnorm"])), dim=-1) @ own["eh_proj"].T
        positions = torch.arange(len(ids))[None]
        angles = deeper.model.rotary_emb(x[None], positions)
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        out = deeper.model.layers[number](x[None], attention_mask=mask, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out)[0]

    check_head(folder, hidden, states_of, lambda states: rms(states, norm))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_images", "qwen3_5_moe", "qwen3_5_moe_images", "qwen3_next"])
def test_qwen_mtp_layer_equals_its_definition(name: str):
    folder, reference = qwen_mtp_folder(name), QwenMtpReference(name)
    tensors = load_file(folder / "model.safetensors")
    embedding = next(each for key, each in tensors.items() if key.endswith("embed_tokens.weight"))
    hidden = torch.randn(len(PROMPT) - 1, embedding.shape[1], generator=torch.Generator().manual_seed(1))

    def states_of(ids: list[int], given: Tensor) -> Tensor:
        return reference(embedding[torch.tensor(ids)], given)

    theirs = check_head(folder, hidden, states_of, lambda states: states)
    # Each of these would be another head.
    swapped = reference.fc.weight.roll(embedding.shape[1], dims=1)
    for other, changes in (("fc", swapped), ("norm", reference.norm.weight + 1)):
        own = getattr(reference, other).weight
        kept = own.clone()
        own.copy_(changes)
        assert relative_error(states_of(PROMPT[1:], hidden), theirs) > 0.05, other
        own.copy_(kept)


@torch.no_grad()
def test_quantised_qwen_head_equals_its_numbers(tmp_path: Path):
    folders = quantise(qwen_mtp_folder("qwen3_next"), tmp_path, "fp8_block")
    hidden = torch.randn(len(PROMPT) - 1, 32, generator=torch.Generator().manual_seed(1))
    quantised, plain, exact = (
        _ours(_loaded(folder, "mtp"), hidden, (), 7) for folder in (*folders, qwen_mtp_folder("qwen3_next"))
    )
    assert all(map(torch.equal, quantised, plain))
    assert relative_error(plain[0], exact[0]) > 1e-3, "layers are quantised"


@torch.no_grad()
@pytest.mark.parametrize("norms_stream", [False, True])
def test_eagle_head_equals_its_definition(norms_stream: bool):
    changes = {"norm_before_residual": True} if norms_stream else {}
    target, tensors = reference_model(EAGLE_TARGET), eagle_tensors()
    outputs = target.model(torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True)
    # Before layers 2, n / 2 and n - 3 of 4.
    aux = tuple(outputs.hidden_states[index][0][:-1] for index in (2, 2, 1))
    embed = target.model.embed_tokens
    draft = _loaded(checkpoint_folder(EAGLE_TARGET), "eagle3", eagle_folder(**changes))
    assert draft.draft.aux_layers == (2, 2, 1)

    def weight(name: str) -> Tensor:
        return tensors[f"{name}.weight"]

    def rms(x: Tensor, name: str) -> Tensor:
        return weight(name) * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(x: Tensor) -> Tensor:
        """[tokens, heads, 16], rotated in halves."""
        angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(8) / 8)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((x[..., :8] * cos - x[..., 8:] * sin, x[..., 8:] * cos + x[..., :8] * sin), dim=-1)

    def states_of(ids: list[int], given: Tensor) -> Tensor:
        normed = rms(given, "midlayer.hidden_norm")
        x = torch.cat((rms(embed(torch.tensor(ids)), "midlayer.input_layernorm"), normed), dim=-1)
        query, key, value = ((x @ weight(f"midlayer.self_attn.{each}_proj").T).unflatten(1, (-1, 16)) for each in "qkv")
        query, key = turned(query), turned(key).repeat_interleave(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / 4
        shares = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, value.repeat_interleave(2, dim=1)).flatten(1)
        stream = (normed if norms_stream else given) + attended @ weight("midlayer.self_attn.o_proj").T
        x = rms(stream, "midlayer.post_attention_layernorm")
        gates = F.silu(x @ weight("midlayer.mlp.gate_proj").T) * (x @ weight("midlayer.mlp.up_proj").T)
        return stream + gates @ weight("midlayer.mlp.down_proj").T

    given = torch.cat(aux, dim=-1) @ weight("fc").T
    theirs = states_of(PROMPT[1:], given)
    second = states_of([*PROMPT[1:], 77], torch.cat((given, theirs[-1:])))[-1:]
    for chunk in (len(PROMPT), 7):
        ours, again = _ours(draft, aux[0], aux, chunk)
        assert relative_error(ours, theirs) < TOLERANCE
        assert relative_error(again, second) < TOLERANCE
    head = draft.module
    assert isinstance(head, DraftHead)
    own_ids = (rms(theirs, "norm") @ weight("lm_head").T).argmax(dim=-1)
    assert head.token_ids(head.argmax(ours)[1]).tolist() == (own_ids + tensors["d2t"][own_ids]).tolist()


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_copy_of_the_targets_embedding_is_filled(prefix: str, tmp_path: Path):
    """Files of the target may leave out a prefix of its name."""
    config = read_model_files(family_folder("gpt2")).model_config
    tensors = load_file(family_folder("gpt2") / "model.safetensors")
    expected = tensors["transformer.wte.weight"]
    renamed = {prefix + name.removeprefix("transformer."): each for name, each in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    embedding = VocabularyParallelEmbedding(context, config.num_embeddings, config.embedding_size)
    store = embedding_store(embedding, config, torch.float32, allows_nonfinite=False)
    with store.open(tmp_path) as source:
        store.fill(source)
    assert torch.equal(embedding.weight[: len(expected)], expected)


def test_mtp_without_a_choice_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="takes its choice of keys from another"):
        _loaded(mtp_folder("glm_moe_dsa_shared"), "mtp")
