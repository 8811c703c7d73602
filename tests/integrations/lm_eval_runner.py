"""Runs the harness on local tasks and writes what it found: `TASKS_FOLDER OUT_FOLDER EVALUATIONS`.

The evaluations are JSON: by name (which is a folder in OUT_FOLDER) the model, its arguments, whether it chats, and the
adapter to use after another.
In a process of its own, and as a rank.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

TASKS = ["local_choice", "local_sums", "local_text"]


def evaluate(
    tasks: Path, out: Path, *, model: str, arguments: str, chat: bool = False, adapters: tuple[str | None, ...] = ()
) -> None:
    from lm_eval.api.registry import get_model

    if model == "spmd_worker":
        import spmd_worker.integrations.lm_eval_model  # noqa: F401  # registers the model
    made = get_model(model).create_from_arg_string(arguments, {"device": "cpu"}) if adapters else None
    for adapter in adapters:
        # The results of the last one are kept.
        made.use_adapter(adapter)
        report(tasks, out, made, arguments, chat)
    if not adapters:
        report(tasks, out, model, arguments, chat)


def report(tasks: Path, out: Path, model: object, arguments: str, chat: bool) -> None:
    import lm_eval
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    # The harness describes the machine with each result, for which it runs pip and other commands: most of the time.
    evaluator.add_env_info = lambda _results: None
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["local_sums"] if chat else TASKS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=4,
        device="cpu",
        apply_chat_template=chat,
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
    for name, options in json.loads(sys.argv[3]).items():
        evaluate(Path(sys.argv[1]), Path(sys.argv[2]) / name, **options)
