"""outlines with an engine of this package: `outlines.from_vllm_offline(llm)` accepts an `LLM` unchanged.

    import spmd_worker.integrations.outlines  # before the first answer; nothing else in the script changes

    model = outlines.from_vllm_offline(LLM("DIR"))
    model("a prompt", sampling_params=SamplingParams(max_tokens=20))

outlines imports the classes of its parameters from `vllm.sampling_params` at its first answer: they are this package's
then. It translates an output type to `SamplingParams.structured_outputs`.
"""

from typing import Any, Final

from spmd_worker.integrations.vllm_modules import install_modules
from spmd_worker.llm import LLM
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

MODULES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"LLM": LLM, "SamplingParams": SamplingParams},
    "vllm.sampling_params": {"SamplingParams": SamplingParams, "StructuredOutputsParams": StructuredOutputsParams},
}

install_modules(MODULES, __name__)
