"""Weights changed in place, and newly loaded ones, give bit-identical answers to a checkpoint with these weights."""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ranks
from changed_weights import KINDS, answers, change_of, changed_pair
from native_builds import NATIVE, WITH_AMX, WITHOUT_AMX
from native_libraries import needs_avx512, use
from safetensors.torch import load_file

from spmd_worker import LLM
from spmd_worker.model.layers.checkpoint_layer import PackedLayer

LAYOUTS: dict[str, tuple[str, list[str]]] = {
    "tied": ("tied", []),
    "untied": ("untied", []),
    "shards": ("untied", ["tensor"]),
    "stages": ("tied", ["pipeline"]),
}
"""Model, and how it is divided."""
KERNELS: dict[str, tuple[str, str]] = {
    "float32": ("float32", NATIVE),
    "bfloat16": ("bfloat16", WITHOUT_AMX),
    "AMX": ("bfloat16", WITH_AMX),
}
QUICK = {("tied", "float32"), ("shards", "float32")}
IN_LAYOUTS = {("stages", "float32"), ("tied", "bfloat16"), ("shards", "AMX")}
"""The tier of layouts: each model, layout and kind of kernels. Others are in the stress tier."""


def each_case() -> list[Any]:
    cases = []
    for case in product(LAYOUTS, KERNELS):
        marks = [] if case in QUICK else [pytest.mark.matrix if case in IN_LAYOUTS else pytest.mark.stress]
        marks += [needs_avx512] if case[1] == "AMX" else []
        cases.append(pytest.param(*case, marks=marks))
    return cases


def change(llm: LLM, factors: dict[str, float]) -> str:
    llm.apply_model(lambda model: [each.mul_(factors[name]) for name, each in model.named_parameters()] and None)
    return answers(llm)


def compare(folder: Path, dtype: str, **layout: int) -> None:
    base, changed = (load_file(folder / name / "model.safetensors") for name in ("base", "changed"))
    with LLM(folder / "changed", dtype=dtype, num_blocks=64, **layout) as llm:
        expected = answers(llm)
    with LLM(folder / "base", dtype=dtype, num_blocks=64, **layout) as llm:
        before = answers(llm)
        assert change(llm, {name: change_of(name) for name in base}) == expected != before
        for weights, expected_answers in ((base, before), (changed, expected)):
            llm.update_weights(weights.items())
            assert answers(llm) == expected_answers
        for kind in KINDS:
            zero = {name: float(kind not in name) for name in base}
            llm.update_weights((name, each * zero[name]) for name, each in base.items())
            expected = answers(llm)
            llm.update_weights(base.items())
            assert change(llm, zero) == expected
            assert (expected == before) == (kind == "lm_head" and "lm_head.weight" not in base)


@pytest.mark.gate("shards-float32", "tied-bfloat16")
@pytest.mark.parametrize(("layout", "kernels"), each_case())
def test_new_weights_answer_as_a_checkpoint_with_them(layout: str, kernels: str):
    (model, cut), (dtype, library) = LAYOUTS[layout], KERNELS[kernels]
    ranks.run_forked([__file__, changed_pair(model), dtype, library, *cut], 1 + len(cut), timeout_s=240).checked()


def test_comparison_detects_weights_not_prepacked_again(monkeypatch: pytest.MonkeyPatch):
    write_region = PackedLayer.write_region

    def write_before_packing(layer: PackedLayer, *given: Any) -> None:
        if not layer.is_packed:
            write_region(layer, *given)

    monkeypatch.setattr(PackedLayer, "write_region", write_before_packing)
    with pytest.raises(AssertionError):
        compare(changed_pair("tied"), "float32")


if __name__ == "__main__":
    use(sys.argv[3])
    compare(Path(sys.argv[1]), sys.argv[2], **{f"{cut}_parallel_size": 2 for cut in sys.argv[4:]})
