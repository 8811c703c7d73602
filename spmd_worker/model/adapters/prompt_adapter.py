"""A prompt adapter of PEFT (https://huggingface.co/docs/peft): rows before every prompt, or their keys and values.

Prompt tuning (https://arxiv.org/abs/2104.08691) and p-tuning (https://arxiv.org/abs/2103.10385), whose encoder PEFT has
evaluated when it saves, are rows of input embeddings; prefix tuning (https://arxiv.org/abs/2101.00190) is keys and
values of all layers. A folder has one tensor, `prompt_embeddings`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.source import read_config, read_tensors
from spmd_worker.model.layers.linear import kv_head_range
from spmd_worker.model.weights.tensor_checks import is_finite
from spmd_worker.model_config.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, local_adapter
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import Stage
from spmd_worker.replica.sequence.input_rows import EMBEDDINGS, KEYS_VALUES

_TENSOR: Final = "prompt_embeddings"
_KINDS: Final[Mapping[str, str]] = {
    "PROMPT_TUNING": EMBEDDINGS,
    "P_TUNING": EMBEDDINGS,
    "PREFIX_TUNING": KEYS_VALUES,
}
_REFUSED: Final[Mapping[str, str]] = {
    "MULTITASK_PROMPT_TUNING": "its rows depend on a task id, which requests do not have: save the rows of one task",
    "CPT": "context-aware prompt tuning changes the embeddings of the prompt's own tokens: use PROMPT_TUNING",
    "LORA": "it is a LoRA adapter: give it as lora_request, to add_lora, or in model.adapters",
}
_TASKS: Final = (None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS")
_NUM_DIGESTS: Final = (1 << 62) - 1


@dataclass(frozen=True, eq=False)
class PromptAdapter:
    """`tensor` [virtual tokens, width] as it is stored; `subject`, the folder, begins every error."""

    subject: str
    kind: str
    tensor: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.tensor)

    @cached_property
    def digest(self) -> int:
        """63 bits, above 0, of kind, dtype, shape and numbers; the lowest tells whether they are keys and values."""
        state = hashlib.sha256(f"{self.kind} {self.tensor.dtype} {list(self.tensor.shape)}".encode())
        state.update(self.tensor.contiguous().view(torch.uint8).numpy().data)
        number = int.from_bytes(state.digest()[:8], "little") % _NUM_DIGESTS + 1
        return 2 * number + (self.kind == KEYS_VALUES)


def read_prompt_adapter(path: str | Path) -> PromptAdapter:
    """Read a PEFT folder, local or remote. Raises AdapterError, which names the file and the key or tensor."""
    folder = local_adapter(path)
    config = read_config(folder)
    file, kind = f"{path}/{CONFIG_FILE}", str(config.get("peft_type"))
    if kind not in _KINDS:
        reason = _REFUSED.get(kind, f"prompt adapters are {', '.join(_KINDS)}")
        raise AdapterError(f"{file}: peft_type={shown(kind)} is not supported: {reason}")
    task = config.get("task_type")
    if task not in _TASKS or config.get("num_transformer_submodules") not in (None, 1):
        raise AdapterError(f"{file}: task_type={shown(task)} is that of an encoder-decoder, which is not supported")
    if config.get("modules_to_save"):
        raise AdapterError(f"{file}: modules_to_save replace weights of the base: save the complete model instead")
    tensors, where = read_tensors(folder), f"{path}/{WEIGHTS_FILE}"
    if list(tensors) != [_TENSOR] or tensors[_TENSOR].ndim != 2:
        shapes = {name: list(each.shape) for name, each in tensors.items()}
        raise AdapterError(f"{where}: has {shapes}: a prompt adapter has one tensor, {_TENSOR} [virtual tokens, width]")
    tensor = tensors[_TENSOR]
    if not len(tensor) or len(tensor) != config.get("num_virtual_tokens"):
        raise AdapterError(
            f"{where}: {_TENSOR} has {len(tensor)} rows, but num_virtual_tokens is "
            f"{shown(config.get('num_virtual_tokens'))} in {CONFIG_FILE}"
        )
    if not is_finite(tensor, torch.float32):
        raise AdapterError(f"{where}: {_TENSOR} has values that are not finite: its training diverged")
    return PromptAdapter(where, _KINDS[kind], tensor)


def rows_for(adapter: PromptAdapter, model_config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Rows of embeddings [virtual tokens, width of the model's embedding]. Raises AdapterError."""
    width = model_config.embedding_size
    if model_config.takes_ids:
        raise AdapterError(
            f"{adapter.subject}: layers of this model read inputs of each token id, and virtual tokens have no id: "
            f"prompt tuning is not supported"
        )
    if adapter.tensor.shape[1] != width:
        raise AdapterError(f"{adapter.subject}: rows of {adapter.tensor.shape[1]} numbers, the model's have {width}")
    return _in_dtype(adapter, dtype)


def keys_values_for(
    adapter: PromptAdapter, model_config: ModelConfig, dtype: torch.dtype, stage: Stage, tensor_ranks: tuple[int, int]
) -> Tensor:
    """Keys and values of a stage's layers and of a rank's heads: [layers, 2, virtual tokens, heads, head size], for
    rank `tensor_ranks[0]` of `tensor_ranks[1]`. Raises AdapterError.
    """
    if model_config.is_encoder:
        raise AdapterError(f"{adapter.subject}: an encoder keeps no keys and values: PREFIX_TUNING is not supported")
    if model_config.has_states:
        raise AdapterError(
            f"{adapter.subject}: keys and values of virtual tokens have no recurrent state, and this model has layers "
            f"with one: PREFIX_TUNING is not supported"
        )
    if any(layer.kv_layer is not None for layer in model_config.layers):
        raise AdapterError(
            f"{adapter.subject}: layers of this model read keys and values of others: PREFIX_TUNING is not supported"
        )
    if any(layer.latent is not None or layer.compressed is not None for layer in model_config.layers):
        raise AdapterError(
            f"{adapter.subject}: this model keeps latents or keys alone in place of keys and values: PREFIX_TUNING "
            f"is not supported"
        )
    if any(layer.indexer is not None for layer in model_config.layers):
        raise AdapterError(
            f"{adapter.subject}: virtual tokens have no keys by which layers of this model choose those that a token "
            f"sees: PREFIX_TUNING is not supported"
        )
    sizes_of = [
        (each.num_kv_heads, size) for each in model_config.layers for size in (each.head_size, each.value_head_size)
    ]
    sizes = list(dict.fromkeys(sizes_of))
    width = sum(2 * layer.num_kv_heads * layer.head_size for layer in model_config.layers)
    if len(sizes) > 1 or model_config.image_layers or adapter.tensor.shape[1] != width:
        expected = f"{width} of this model ({model_config.num_layers} layers x 2 x key-value heads x head size)"
        problem = "keys and values of different sizes are not supported" if len(sizes) > 1 else f"not the {expected}"
        raise AdapterError(
            f"{adapter.subject}: keys and values of {adapter.tensor.shape[1]} numbers a token, {problem}"
        )
    ((num_heads, head_size),) = sizes
    tensor = _in_dtype(adapter, dtype).view(adapter.num_tokens, model_config.num_layers, 2, num_heads, head_size)
    rank, size = tensor_ranks
    first, end = kv_head_range(num_heads, size, rank)
    return tensor[:, stage.start : stage.stop, :, first:end].permute(1, 2, 0, 3, 4).contiguous()


def _in_dtype(adapter: PromptAdapter, dtype: torch.dtype) -> Tensor:
    if not is_finite(adapter.tensor, dtype):
        raise AdapterError(f"{adapter.subject}: has values that are not finite in {dtype}, the model's dtype")
    return adapter.tensor.to(dtype)
