"""Options of speculative decoding, in vLLM's words: who drafts tokens, and how many."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from spmd_worker.base.config.options import check_options, option
from spmd_worker.base.errors import ConfigError

METHODS: Final = ("ngram", "suffix", "draft_model", "mtp", "eagle3")
REPLICA_METHODS: Final = ("ngram", "suffix")
"""Methods whose drafts every replica computes from tokens; those of the others come from the workers."""
REJECTED_METHODS: Final[Mapping[str, str]] = {
    "eagle": "heads of the first EAGLE are not read: give a head of EAGLE-3 (eagle3), or suffix",
    "ngram_gpu": "the search takes microseconds on the host: give ngram, which drafts the same",
    "medusa": "its heads are trained for rejection over a tree: give suffix, or a draft_model",
    "mlp_speculator": "its checkpoints are not read: give suffix, or a draft_model",
    "dflash": "its checkpoints are not read: give suffix, eagle3 or a draft_model",
    "dspark": "its checkpoints are not read: give suffix, eagle3 or a draft_model",
    "custom_class": "every replica must draft alike, which custom code cannot guarantee: give one of the methods",
    "extract_hidden_states": "it drafts nothing: leave it out",
}
"""Method of vLLM's -> why it is rejected, and the alternative."""
_MODEL_METHODS: Final = ("draft_model", "eagle3")
_DEFAULT_DRAFTS: Final = 5
_SUFFIX_DRAFTS: Final = 16
_LOOKUP_TOKENS: Final = 5
MOST_DRAFTS: Final = 256
CPU_STEP_TOKENS: Final = 40
AMX_STEP_TOKENS: Final = 128
GPU_STEP_TOKENS: Final = 192
"""Tokens that a step computes while it reads the weights, on CPUs without and with AMX, and on GPUs."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: drafted tokens are verified by sampling, so answers have the same bits with and without."""

    method: str | None = option(
        None,
        "who drafts: `ngram` (what followed the same tokens earlier in the row), `suffix` (in earlier rows too), "
        "`draft_model`, `mtp` (the model's own layers), `eagle3`; null: off",
        keyword=None,
        choices=METHODS,
    )
    num_speculative_tokens: int | None = option(
        None,
        f"most drafts of a row in a step; null: {_DEFAULT_DRAFTS}, of `suffix` {_SUFFIX_DRAFTS}",
        keyword=None,
        least=1,
        most=MOST_DRAFTS,
    )
    prompt_lookup_max: int | None = option(
        None,
        f"most tokens that `ngram` looks up; null: `prompt_lookup_min`, or {_LOOKUP_TOKENS}",
        keyword=None,
        least=1,
    )
    prompt_lookup_min: int | None = option(
        None,
        f"least tokens that `ngram` looks up; null: `prompt_lookup_max`, or {_LOOKUP_TOKENS}",
        keyword=None,
        least=1,
    )
    model: str | None = option(None, "folder of the draft model, or of the head of `eagle3`", keyword=None)
    draft_tensor_parallel_size: int | None = option(
        None, "null, or the model's own size: drafts are computed on the same ranks", keyword=None, least=1
    )
    suffix_decoding_max_tree_depth: int = option(24, "tokens of a path in a tree of suffixes", keyword=None, least=1)
    suffix_decoding_max_cached_requests: int = option(
        10_000, "answers of earlier rows that `suffix` looks up; 0: none", keyword=None, least=0
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "most drafts of `suffix` for each token that was found", keyword=None, least=0
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "least share of a draft among what followed the same tokens", keyword=None, least=0, most=1
    )
    max_step_tokens: int | None = option(
        None,
        "most tokens of a step in which rows have drafts: more would cost time; null: what rank 0's device computes "
        "while it reads the weights",
        keyword=None,
        least=1,
    )

    def __post_init__(self) -> None:
        if isinstance(self.method, str) and self.method in REJECTED_METHODS:
            raise ConfigError(f"speculative_config.method={self.method} is rejected: {REJECTED_METHODS[self.method]}")
        check_options(self, "speculative_config")
        lookup = (self.prompt_lookup_min, self.prompt_lookup_max)
        least, most = lookup[0] or lookup[1] or _LOOKUP_TOKENS, lookup[1] or lookup[0] or _LOOKUP_TOKENS
        if least > most:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min={least} is above "
                f"speculative_config.prompt_lookup_max={most}: lower it"
            )
        self._check_used()
        if self.method in _MODEL_METHODS and not self.model:
            raise ConfigError(
                f"speculative_config.method={self.method} needs a model: give its folder as speculative_config.model"
            )

    def _check_used(self) -> None:
        """Every option but `method` is of drafts, and a folder is of methods that draft by another model."""
        given = [spec.name for spec in fields(self)[1:] if getattr(self, spec.name) != spec.default]
        for name in given:
            key = f"speculative_config.{name}={getattr(self, name)}"
            if self.method is None:
                raise ConfigError(
                    f"{key} has no effect without speculative_config.method: choose one of {', '.join(METHODS)}, or "
                    f"leave it out"
                )
            if name == "model" and self.method in REPLICA_METHODS:
                raise ConfigError(
                    f"{key} has no effect with method {self.method}, which drafts without a model: leave it out, or "
                    f"choose one of {', '.join(_MODEL_METHODS)}"
                )

    @property
    def is_on(self) -> bool:
        return self.method is not None

    @property
    def most_drafts(self) -> int:
        """`num_speculative_tokens`, or the method's default."""
        default = _SUFFIX_DRAFTS if self.method == "suffix" else _DEFAULT_DRAFTS
        return self.num_speculative_tokens or default

    @property
    def lookup_tokens(self) -> tuple[int, int]:
        """`prompt_lookup_min` and `prompt_lookup_max`."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or _LOOKUP_TOKENS, most or least or _LOOKUP_TOKENS

    @property
    def step_tokens(self) -> int:
        """`max_step_tokens`; resolved when an engine starts."""
        return self.max_step_tokens or CPU_STEP_TOKENS
