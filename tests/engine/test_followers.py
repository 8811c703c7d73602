"""Rank 0 drives the engine while the others follow, and all go on together afterwards."""

import json
import os
import sys
from pathlib import Path

import pytest
import ranks

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import RankFailedError, RanksDisagreeError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.finding(number="D6")
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.stress)],
    ids=str,
)
def test_llm_goes_on_when_followers_return(tmp_path: Path, layout: dict[str, int]):
    """The engine was closed: the next call raised "this LLM was closed"."""
    # Imports transformers, for which each rank would wait.
    from reference_models import checkpoint_folder, mixed_prompts

    prompts = json.dumps(mixed_prompts(4, 40, seed=3))
    arguments = [json.dumps(layout), str(checkpoint_folder("llama3")), prompts, tmp_path]
    ranks.run_forked([__file__, *arguments], nproc=2, timeout_s=240).checked()
    first, second = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert first["together"] == second["together"] == first["alone"]
    assert first["turns"] + second["turns"] == first["alone"]
    assert first["same"] == second["same"] == first["alone"][:1]
    # Rank 1 had the answer to rank 0's request.
    difference = "max_tokens of request 23 is 6 on rank 0, 7 on rank 1; make the same calls of add_request"
    assert f"ranks were given different requests: {difference}" in second["other"]
    assert "rank 1 raised RanksDisagreeError" in first["other"]
    assert difference in first["other"]
    assert first["words"].startswith("1 requests of llm_engine.add_request or enqueue are not answered yet")


def main(layout: dict[str, int], folder: str, prompts: list[list[int]], target: Path) -> None:
    rank, seen = int(os.environ["RANK"]), dict[str, object]()

    def ask(llm: LLM, given: list[list[int]]) -> list[list[int]]:
        return [each.outputs[0].token_ids for each in llm.generate(given, GREEDY, use_tqdm=False)]

    with LLM(folder, num_blocks=100, device="cpu", **layout) as llm:
        engine = llm.llm_engine
        for again in range(2):
            if rank == 0:
                found = {}
                for index, prompt in enumerate(prompts):
                    engine.add_request(f"{again} {index}", prompt, GREEDY)
                while engine.has_unfinished_requests():
                    found |= {each.request_id: each.outputs[0].token_ids for each in engine.step()}
                seen["alone"] = [found[f"{again} {index}"] for index in range(len(prompts))]
                engine.add_request("late", prompts[0], GREEDY)
                try:
                    engine.close_followers()
                except RuntimeError as error:
                    seen["words"] = str(error)
                while engine.has_unfinished_requests():
                    engine.step()
                engine.close_followers()
            else:
                engine.follow()
            seen["together"] = ask(llm, prompts)
        with llm.turns():
            # One rank asks once, the other three times.
            seen["turns"] = ask(llm, prompts[:1]) if rank == 0 else [ask(llm, [each])[0] for each in prompts[1:]]
        engine.add_request("same", prompts[0], GREEDY)
        while engine.has_unfinished_requests():
            seen["same"] = [each.outputs[0].token_ids for each in engine.step()]
        engine.add_request("other", prompts[1], SamplingParams(temperature=0, max_tokens=6 + rank))
        try:
            while engine.has_unfinished_requests():
                engine.step()
        except (RanksDisagreeError, RankFailedError) as error:
            seen["other"] = str(error)
    (target / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
