"""Runs the harness on local tasks with one model and writes what it found: `MODEL ARGUMENTS TASKS_FOLDER OUT_FOLDER`.

In a process of its own, and as a rank under torchrun.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

TASKS = ["local_choice", "local_sums", "local_text"]


def main(model: str, arguments: str, tasks: Path, out: Path, chat: str) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    if model == "spmd_worker":
        import spmd_worker.integrations.lm_eval_model  # noqa: F401  # registers the model
    is_chat = chat == "chat"
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["local_sums"] if is_chat else TASKS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=4,
        device="cpu",
        apply_chat_template=is_chat,
        fewshot_as_multiturn=False,
        bootstrap_iters=0,
        cache_requests=False,
    )
    rank = os.environ.get("RANK", "0")
    if results is None:
        # The harness reports on the first rank of a node; every rank has the answers.
        (out / f"rank{rank}.json").write_text("null")
        return
    samples = {
        name: [[sample["doc_id"], sample["resps"], sample["arguments"]] for sample in each]
        for name, each in results["samples"].items()
    }
    (out / f"rank{rank}.json").write_text(json.dumps({"results": results["results"], "samples": samples}, default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
