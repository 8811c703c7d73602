"""Calls with adapters on several ranks: the answers of one rank, for common prompts and for each rank's own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from adapter_folders import DEMO, TARGETS, write_adapter

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import RankFailedError, RanksDisagreeError

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [f"add {number} 7 =" for number in range(9)]
NAMES = (None, "a", "b")


def answers_of(outputs: list[Any]) -> list[list[float]]:
    """Token ids, and the log-probabilities of all that are listed."""
    samples = [output.outputs[0] for output in outputs]
    return [
        [*each.token_ids, *(value.logprob for position in each.logprobs for value in position.values())]
        for each in samples
    ]


def main(folder: Path, **options: Any) -> None:
    """A rank's answers, in a file; adapters are in a folder of its own."""
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "max_num_seqs": 4}
    with LLM(DEMO, enable_lora=True, max_loras=2, **given | options) as llm:
        rank = llm.llm_engine.engine_channel.rank
        requests: dict[str | None, LoRARequest | None] = {None: None}
        for number, name in enumerate("ab", 1):
            # Of other projections whose inputs ranks share.
            of = ("q_proj", "o_proj") if name == "b" else TARGETS
            requests[name] = LoRARequest(name, number, write_adapter(folder / f"{rank}{name}", DEMO, number, of))
        listed = [requests[NAMES[index % 3]] for index in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=listed, use_tqdm=False)
        assert [output.lora_request for output in outputs] == listed
        seen: dict[str, Any] = {"common": answers_of(outputs), "loaded": sorted(llm.list_loras())}
        if llm.llm_engine.engine_channel.size > 1 and not options.get("distributed_executor_backend"):
            own = slice(rank, None, 2)
            seen["own"] = answers_of(
                llm.generate(PROMPTS[own], PARAMS, lora_request=listed[own], use_tqdm=False, gather=True)
            )
            with llm.turns():
                for index in range(rank, 3):
                    output = llm.generate(PROMPTS[index], PARAMS, lora_request=listed[index], use_tqdm=False)
                    seen.setdefault("turns", []).append(answers_of(output)[0])
            # Only one rank names an adapter; then only one rank's prompts need another one.
            with pytest.raises(RanksDisagreeError, match="lora"):
                llm.generate(PROMPTS[0], PARAMS, lora_request=requests["a" if rank else None], use_tqdm=False)
            new = LoRARequest("c", 3, write_adapter(folder / f"{rank}c", DEMO, 3))
            with pytest.raises((ValueError, RankFailedError), match="call add_lora before"):
                llm.generate(PROMPTS[0], PARAMS, lora_request=new if rank else None, use_tqdm=False, gather=True)
            seen["after"] = answers_of(llm.generate(PROMPTS, PARAMS, lora_request=listed, use_tqdm=False))
        (folder / f"seen{rank}").write_text(json.dumps(seen))


DP, TP = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}
LAYOUTS = [
    DP,
    TP,
    *(
        pytest.param(each, marks=pytest.mark.matrix)
        for each in (
            {**TP, "dtype": "bfloat16"},
            {**TP, "quantization": "int8"},
            {"pipeline_parallel_size": 2},
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "multiproc"},
        )
    ),
]


@pytest.mark.gate("{'tensor_parallel_size': 2, 'dtype': 'bfloat16'}", "{'pipeline_parallel_size': 2}")
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_answer_with_adapters_as_one(layout: dict[str, Any], tmp_path: Path):
    (tmp_path / "one").mkdir()
    main(tmp_path / "one", **{key: layout[key] for key in ("dtype", "quantization") if key in layout})
    expected = json.loads((tmp_path / "one" / "seen0").read_text())["common"]
    assert len({str(each) for each in expected}) == len(PROMPTS)
    if "distributed_executor_backend" in layout:
        main(tmp_path, **layout)
    else:
        ranks.run_forked([__file__, json.dumps(layout), tmp_path], nproc=2, timeout_s=240).checked()
    for rank, path in enumerate(sorted(tmp_path.glob("seen*"))):
        seen = json.loads(path.read_text())
        assert seen["common"] == expected
        assert seen["loaded"] == [1, 2]
        if "own" in seen:
            assert seen["own"] == expected[rank::2]
            assert seen["turns"] == expected[rank:3]
            assert seen["after"] == expected


if __name__ == "__main__":
    main(Path(sys.argv[2]), **json.loads(sys.argv[1]))
