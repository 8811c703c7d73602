"""mteb's tasks on this runtime: an encoder that mteb uses like a SentenceTransformer.

    mteb.evaluate(SpmdWorkerEncoder("DIR"), mteb.get_tasks(["STS12"]))

Prompts and the similarity are those of the folder's config_sentence_transformers.json, chosen as mteb and
sentence-transformers choose them.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from spmd_worker.base.config.extras import package_error

try:
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ScoringFunction
except ImportError as error:
    raise package_error("mteb", "mteb", error) from error

from numpy.typing import NDArray

from spmd_worker.base.config.schema import PlanConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.llm import LLM
from spmd_worker.model_config.sentence_folder import read_evaluation_settings
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.resolved import find_model

_NAMES: Final = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts by kind of text, in sentence-transformers, if the task has no prompt of its own."""


class SpmdWorkerEncoder(AbsEncoder):  # type: ignore[misc]  # of a package that may not be there
    """`model_name` is a folder or a name on the hub; `options` are `LLM`'s, `prompts` replace the folder's,
    `lora_request` is a LoRA adapter for all texts. Texts beyond the model's length are truncated, as in
    sentence-transformers. Raises what `LLM` does, and ModelConfigError for settings that cannot be used.
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str],
        revision: str | None = None,
        device: str | None = None,
        *,
        prompts: dict[str, str] | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> None:
        # mteb passes its own devices, such as cuda:0. Prompts are prepended to texts here, by their kind.
        own = str(device or "auto").split(":")[0]
        self._lora_request = lora_request
        if lora_request is not None:
            options.setdefault("enable_lora", True)
        # Before the weights are loaded; of the folder that LLM finds.
        config = replace(run_config({"model": model_name, "revision": revision}), plan=PlanConfig(enabled=True))
        settings = read_evaluation_settings(find_model(config).folder)
        self._prompts = dict(settings.prompts if prompts is None else prompts)
        self._default = settings.default_prompt_name
        self.llm = LLM(
            os.fspath(model_name), revision=revision, device=own, runner="pooling", default_prompt_name="", **options
        )
        self.model_prompts = self.validate_task_to_prompt_name(self._prompts, raise_for_invalid_keys=False)[0]
        similarity = ScoringFunction(settings.similarity)
        about = {"name": f"spmd_worker/{Path(model_name).name}", "revision": revision, "similarity_fn_name": similarity}
        self.mteb_model_meta = ModelMeta.create_empty(about)

    def encode(
        self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **options: Any
    ) -> NDArray[np.float32]:
        """[texts, numbers]. Raises ConfigError for a precision other than float32, and what `LLM.embed` raises."""
        if options.get("precision") not in (None, "float32"):
            raise ConfigError(f"precision={options['precision']!r}: vectors are float32 here; leave it out")
        named = self.get_prompt_name(task_metadata, prompt_type)
        names = (named, *_NAMES.get(getattr(prompt_type, "value", ""), ()), self._default)
        prompt = next((self._prompts[name] for name in names if name in self._prompts), "")
        texts = [prompt + text for batch in inputs for text in batch["text"]]
        is_shown = bool(options.get("show_progress_bar"))
        outputs = self.llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=is_shown, lora_request=self._lora_request)
        return np.array([each.outputs.embedding for each in outputs], dtype=np.float32)
