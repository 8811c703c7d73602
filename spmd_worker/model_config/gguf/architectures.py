"""The architectures of GGUF that are read, as data: their names in transformers, and what converters change.

A row says how the metadata become a config.json and how tensors are named and stored, as llama.cpp's converter
(`convert_hf_to_gguf.py`) writes them. What a row leaves out is as in Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

_NORMED_HEADS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH: Final = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_EXPERTS: Final = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    }
)
LAYER_NAMES: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
"""Parts of a layer, `blk.N.PART.weight`, and their names in `model.layers.N`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """`model` and `model_type` are transformers' names. `names` are parts of layers that are named otherwise than
    Llama's, and `experts` the stacks of experts, with {} for the number of one. `permutes`: rows of queries and keys
    are stored for a rope of neighbours. `norm_offset` is what converters add to norms. `numbers` are config.json's
    names of numbers by the metadata's keys behind the prefix, and `optional` those that may be missing; `constants` are
    values that no metadata have. `eps_key` is the epsilon's name here and there. `has_window`: a window counts, and is
    not refused. `may_be_partial`: a rope may be of a part of each head.
    """

    model: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    permutes: bool = False
    norm_offset: float = 0.0
    eps_key: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    numbers: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    has_window: bool = False
    may_be_partial: bool = False

    @property
    def layer_names(self) -> dict[str, str]:
        return {**LAYER_NAMES, **self.names}


_QWEN_EXPERTS: Final = {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False}
_EXPERT_NUMBERS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LLAMA: Final = Architecture("LlamaForCausalLM", "llama", permutes=True)
_GEMMA: Final = Architecture(
    "GemmaForCausalLM", "gemma", norm_offset=1.0, constants={"hidden_act": "gelu_pytorch_tanh"}
)
_GEMMA2: Final = replace(
    _GEMMA,
    model="Gemma2ForCausalLM",
    model_type="gemma2",
    names={**_SANDWICH, "ffn_norm": "pre_feedforward_layernorm"},
    optional={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    constants={"hidden_activation": "gelu_pytorch_tanh"},
    has_window=True,
)

MIXTRAL: Final = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    permutes=True,
    numbers={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    constants={"sliding_window": None},
)
"""`llama` with experts."""

ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": _LLAMA,
    "smollm3": replace(
        _LLAMA,
        model="SmolLM3ForCausalLM",
        model_type="smollm3",
        constants={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "granite": replace(
        _LLAMA,
        model="GraniteForCausalLM",
        model_type="granite",
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", constants={"use_sliding_window": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", names=_NORMED_HEADS, constants={"use_sliding_window": False}),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        names={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        experts=_EXPERTS,
        numbers={**_EXPERT_NUMBERS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants={**_QWEN_EXPERTS, "norm_topk_prob": False, "qkv_bias": True},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        names={**_NORMED_HEADS, "ffn_gate_inp": "mlp.gate"},
        experts=_EXPERTS,
        numbers=_EXPERT_NUMBERS,
        constants={**_QWEN_EXPERTS, "norm_topk_prob": True},
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        model="Gemma3ForCausalLM",
        model_type="gemma3_text",
        names={**_GEMMA2.names, **_NORMED_HEADS},
        optional={"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        constants={**_GEMMA2.constants, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        has_window=True,
        may_be_partial=True,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", names={**_SANDWICH, **_NORMED_HEADS}),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        eps_key=("norm_epsilon", "attention.layer_norm_epsilon"),
        constants={"use_bias": True, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    ),
}
"""Rows by `general.architecture`. Models of several names share one: Mistral, SmolLM2 and others are `llama`."""
