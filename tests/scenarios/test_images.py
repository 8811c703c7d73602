"""Images through whole tiny models of every kind: transformers' answers, and the same bits in every batch, chunk, cache
and layout.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
from image_models import (
    KINDS,
    NUM_TOKENS,
    OTHERS,
    PICTURES,
    image_folder,
    image_reference,
    image_token_id,
    prompt_of,
    text_of,
    their_answer,
    their_logprobs,
    their_vector,
)
from jobs_of_rows import answers_of_job
from media_models import noise, saved

from spmd_worker import LLM, PromptsRefusedError, SamplingParams
from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.replica.mirror import state_check
from spmd_worker.replica.scheduler import allocator
from spmd_worker.replica.scheduler.planner import Planner
from spmd_worker.worker.runner.media_store import MediaStore

ROOMY: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_blocks": 96, "max_model_len": 192, "max_num_seqs": 6}
_OF_PICTURES = {"num_blocks": 256, "max_model_len": 512}
OF_KIND: dict[str, dict[str, Any]] = {"llava_next": _OF_PICTURES, "llava_next_mistral": _OF_PICTURES}
"""Kinds whose prompts are longer."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
FORKED = SamplingParams(temperature=1, seed=3, n=3, max_tokens=40, logprobs=1, ignore_eos=True)
NUM_LONG = 32
WHOLE_KINDS = ("qwen3_vl", "gemma3", "gemma4", "qwen3_5")
"""Kinds that go through everything: three positions and added rows, sight within an image, the same in some layers and
beyond a window, states.
"""
OTHER_KINDS = tuple(kind for kind in KINDS if kind not in WHOLE_KINDS)
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
}


def prompts(kind: str) -> list[Any]:
    """The third has the first one's ids behind another picture."""
    return [
        prompt_of(kind, PICTURES),
        {"prompt": "Text and no picture, between two that have some."},
        prompt_of(kind, OTHERS),
        prompt_of(kind, PICTURES[:1]),
        prompt_of(kind, [PICTURES[1], PICTURES[1]]),
    ]


PARAMS = [GREEDY, LONG, GREEDY, FORKED, GREEDY]


def answers(llm: LLM, given: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Ids, samples and log-probabilities of each prompt."""
    outputs = llm.generate(given, params, use_tqdm=False)
    return [
        [
            list(output.prompt_token_ids or ()),
            [[list(one.token_ids), [numbers_of(each) for each in one.logprobs or []]] for one in output.outputs],
        ]
        for output in outputs
    ]


def numbers_of(logprobs: dict[int, Any]) -> list[list[Any]]:
    return [[token, each.logprob] for token, each in logprobs.items()]


def opened(kind: str, **options: Any) -> LLM:
    return LLM(str(image_folder(kind)), **{"dtype": "float32", **ROOMY, **OF_KIND.get(kind, {}), **options})


def small(model: "OpenModel", **options: Any) -> dict[str, Any]:
    """Too few blocks for all prompts, and memory for the rows of one large picture."""
    num_added = {"qwen3_vl": 3, "granite_docling": 2}.get(model.kind, 0)
    num_row_bytes = 32 * (4 if model.dtype == "float32" else 2) * (1 + num_added)
    num_blocks, num_rows = 16, 40
    if model.kind in (*OTHER_KINDS, "gemma4"):
        # The rows of two pictures in one prompt, but for one of them, or those of a picture alone, which may be more.
        two, _, _, alone, _ = [each[0].count(image_token_id(model.kind)) for each in model.expected]
        longest = max(len(ids) + len(samples[0][0]) for ids, samples in model.expected)
        # With fewer blocks longer prompts run one after another.
        num_blocks, num_rows = longest // 8 + (4 if model.kind in OF_KIND else 1), max(two - 1, alone)
    rows = {"media_rows_gib": (num_rows * num_row_bytes + 1) / 2**30, "max_encode_patches": 40}
    return {**ROOMY, "num_blocks": num_blocks, "max_model_len": 8 * num_blocks, **rows, **options}


class OpenModel:
    """An engine with room, and each prompt's answer, alone and cold, with the digests of all images' rows."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.kind, self.dtype, self.llm = kind, dtype, opened(kind, dtype=dtype)
        self.expected: list[Any] = []
        with noted_rows() as self.rows:
            for given, params in zip(prompts(kind), PARAMS, strict=True):
                self.llm.reset_prefix_cache()
                self.expected += answers(self.llm, [given], [params])

    def answers(self) -> list[Any]:
        return answers(self.llm, prompts(self.kind), PARAMS)


Models = Callable[..., OpenModel]
"""A kind, and perhaps a dtype, to its model."""


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    made: dict[tuple[str, str], OpenModel] = {}

    def model(kind: str, dtype: str = "float32") -> OpenModel:
        if (kind, dtype) not in made:
            made[kind, dtype] = OpenModel(kind, dtype)
        return made[kind, dtype]

    yield model
    for each in made.values():
        each.llm.llm_engine.scheduler.check_integrity()
        each.llm.close()


@contextmanager
def noted_rows() -> Iterator[dict[str, str]]:
    """Digests of the rows that are made in the block, by image."""
    digests: dict[str, str] = {}
    apply = MediaStore.apply

    def noted(store: MediaStore, plan: Any, *given: Any) -> None:
        apply(store, plan, *given)
        for media_id in store.names:
            digests[media_id.hex()] = sha256(store._rows[media_id].view(torch.uint8).numpy().tobytes()).hexdigest()

    with patch.object(MediaStore, "apply", noted):
        yield digests


def distance(kind: str, theirs: tuple[list[int], list[int], list[float]], ours: Any) -> float:
    """The largest difference of log-probabilities; infinite if ids differ. Behind a token for images or audio that the
    model itself wrote nothing is compared: transformers embeds it as padding.
    """
    prompt_ids, ids, logprobs = theirs
    [[found, numbers]] = ours[1]
    config = json.loads((image_folder(kind) / "config.json").read_text())
    reserved = {config.get(f"{medium}_token_id") for medium in ("image", "video", "audio")}
    end = next((index + 1 for index, token in enumerate(ids) if token in reserved), len(ids))
    if [ours[0], found[:end]] != [prompt_ids, ids[:end]]:
        return float("inf")
    pairs = zip(numbers[:end], ids[:end], logprobs[:end], strict=True)
    return max(abs(dict(each)[token] - right) for each, token, right in pairs)


_TALL, _WIDE, _LARGE = noise(150, 50, 3), noise(51, 257, 7), noise(251, 243, 8)
_SMALL = [noise(33, 77, 9), noise(95, 41, 10), noise(64, 151, 11)]
GIVEN = {
    "two": [PICTURES, OTHERS],
    # LLaVA-NeXT, and alone LLaVA-OneVision, cuts padding off at the sides; above and below. This has fewer tokens than
    # squares.
    "one": [(_TALL,), (_WIDE,), (_LARGE,)],
    # One is there twice. LLaVA-OneVision's rows of a picture alone are others.
    "five": [(_TALL, *_SMALL[:2], _TALL, _SMALL[2]), (_TALL,), (*_SMALL, _TALL, _SMALL[1])],
}
"""Pictures of the prompts of one call."""
LOGPROB_BOUNDS = {"mistral3": 3e-4, "pixtral": 1e-4, "gemma3": 1e-4, "gemma4_clipped": 1e-4, "qwen3_5": 1e-4}
"""Most that log-probabilities may differ, about ten times of what they do; of other kinds 4e-5."""
OF_FIVE: dict[str, Any] = {"max_model_len": 640, "num_blocks": 256}


IN_GATE = (
    "gemma3-two",
    "gemma4-two",
    "qwen3_vl-two",
    "llava_onevision-two",
    "internvl-two",
    "pixtral-two",
    "idefics3-two",
    "granite_docling-two",
)


@pytest.mark.gate(*IN_GATE, "llava_onevision-one", "qwen3_vl-five")
@pytest.mark.guarantee("Answers about images are those of transformers")
@pytest.mark.parametrize(("kind", "number"), [pytest.param(*each, id="-".join(each)) for each in product(KINDS, GIVEN)])
def test_greedy_ids_are_those_of_transformers(kind: str, number: str, models: Models):
    given = GIVEN[number]
    if kind in WHOLE_KINDS and number == "two":
        found = models(kind).expected[0:3:2]
    else:
        asked = [*[prompt_of(kind, each) for each in given], prompts(kind)[1]]
        with opened(kind, **OF_FIVE) as llm:
            found = answers(llm, asked, [GREEDY] * len(asked))[:-1]
    worst = max(distance(kind, their_answer(kind, each), ours) for each, ours in zip(given, found, strict=True))
    print(f"IMAGES OF {kind}, {number} in a prompt: log-probabilities within {worst:.1e} of transformers")
    assert worst < LOGPROB_BOUNDS.get(kind, 4e-5)


@pytest.mark.control("Answers about images are those of transformers")
@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_comparison_detects_another_picture(kind: str, models: Models):
    assert distance(kind, their_answer(kind, OTHERS), models(kind).expected[0]) > 0.02


@pytest.mark.gate("gemma3", "qwen3_5")
@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[pytest.param(kind, "float32", id=kind) for kind in KINDS],
        *[pytest.param(kind, "bfloat16", id=f"{kind} bfloat16") for kind in ("gemma3", "qwen3_vl")],
    ],
)
def test_batched_and_warm_prompts_have_the_bits_of_alone(kind: str, dtype: str, models: Models):
    model = models(kind, dtype)
    model.llm.reset_prefix_cache()
    assert model.answers() == model.expected
    counters = model.llm.llm_engine.counters
    before = counters.num_cached_prompt_tokens
    assert model.answers() == model.expected
    assert counters.num_cached_prompt_tokens > before
    # The first prompt's keys are there, and its ids are the third's.
    assert model.expected[0][0] == model.expected[2][0]
    assert model.expected[0][1] != model.expected[2][1]


@pytest.mark.stress
@pytest.mark.guarantee("Answers about images are those of transformers", is_control_inside=True)
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_bfloat16_answers_are_near_transformers_float32(kind: str, models: Models):
    reference = image_reference(kind)
    rounded, distances = deepcopy(reference).to(torch.bfloat16), []
    given = [(PICTURES, OTHERS), (OTHERS, PICTURES), (PICTURES[:1], OTHERS[:1])]
    found = long_answers(models(kind, "bfloat16").llm, kind)
    for (pictures, others), (ids, [[chosen, numbers]]) in zip(given, found, strict=True):
        ours = torch.tensor([dict(each)[token] for token, each in zip(chosen, numbers, strict=True)])
        asked = [(reference, pictures), (rounded, pictures), (reference, others)]
        right, theirs, wrong = [their_logprobs(model, kind, each, ids, chosen) for model, each in asked]
        distances.append([(each - right).abs().mean().item() for each in (ours, theirs, wrong)])
    own, their, other = torch.tensor(distances).mean(0).tolist()
    print(f"IMAGES OF {kind} in bfloat16: {own:.1e} from float32, transformers {their:.1e}; other pictures {other:.1e}")
    assert own < 1.5 * their < 0.2
    assert other > 2 * own, "negative control"


@pytest.mark.gate("gemma3")
@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_reordered_prompts_have_the_bits_of_alone(kind: str, models: Models):
    model, order = models(kind), (3, 1, 4, 0, 2)
    given = prompts(kind)
    model.llm.reset_prefix_cache()
    found = answers(model.llm, [given[each] for each in order], [PARAMS[each] for each in order])
    assert found == [model.expected[each] for each in order]


def forty(kind: str) -> list[tuple[Any, SamplingParams]]:
    """Twenty prompts of text alone, and as many with one or two of eight pictures."""
    pictures = [noise(40 + 13 * each, 180 - 19 * each, each) for each in range(8)]
    found: list[tuple[Any, SamplingParams]] = []
    for number in range(20):
        chosen = [pictures[number % 8], pictures[3 * number % 8]][: 1 + number % 2]
        sampled = SamplingParams(temperature=1, seed=number, max_tokens=4 + number % 7, logprobs=1, ignore_eos=True)
        found += [
            (prompt_of(kind, chosen, f"{text_of(kind, len(chosen))} {number % 3}"), [GREEDY, sampled][number % 3 // 2]),
            ({"prompt": "Text and no picture. " * (1 + number % 4) + str(number)}, [sampled, GREEDY][number % 2]),
        ]
    return found


@pytest.mark.stress
@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_forty_shuffled_prompts_have_the_bits_of_alone(kind: str):
    asked = forty(kind)
    with opened(kind, num_blocks=1024, max_num_seqs=40, max_num_batched_tokens=200) as llm:
        expected = []
        for prompt, params in asked:
            llm.reset_prefix_cache()
            expected += answers(llm, [prompt], [params])
        for seed in (1, 2):
            order = random.Random(seed).sample(range(len(asked)), len(asked))
            llm.reset_prefix_cache()
            found = answers(llm, [asked[each][0] for each in order], [asked[each][1] for each in order])
            assert found == [expected[each] for each in order]


@pytest.mark.gate("gemma3", "qwen3_vl")
@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[pytest.param(kind, "float32", id=kind) for kind in WHOLE_KINDS],
        *[pytest.param(kind, "bfloat16", id=f"{kind} bfloat16") for kind in ("gemma3", "qwen3_vl")],
    ],
)
def test_prompt_cut_anywhere_has_one_answer(kind: str, dtype: str, models: Models, monkeypatch: pytest.MonkeyPatch):
    """The prompt comes in two chunks, cut at every place; where an image is seen whole, before it."""
    llm, asked = models(kind, dtype).llm, prompt_of(kind, [noise(128, 128, 6)])
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True)
    llm.reset_prefix_cache()
    expected = answers(llm, [asked], [params])
    ids, image = expected[0][0], image_token_id(kind)
    assert ids.count(image) == (64 if kind == "gemma4" else 16)
    computed: list[int] = []

    def budget(planner: Planner) -> int:
        computed.append(sum(each.num_computed_tokens for each in planner._queues.running))
        return len(ids) if computed[-1] else cut

    monkeypatch.setattr(Planner, "_token_budget", budget)
    for cut in range(1, len(ids)):
        llm.reset_prefix_cache()
        computed.clear()
        assert answers(llm, [asked], [params]) == expected, cut
        is_inside = kind.startswith("gemma") and ids[cut - 1] == ids[cut] == image
        assert next(filter(None, computed)) == (ids.index(image) if is_inside else cut)


@pytest.mark.control("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_names_without_pictures_give_the_first_ones_answer(kind: str, models: Models, monkeypatch: pytest.MonkeyPatch):
    """Negative control: blocks named by ids alone."""
    model = models(kind)
    model.llm.reset_prefix_cache()
    monkeypatch.setattr(allocator, "given_rows", lambda request, first: [])
    # The mirror would see it in models with states.
    monkeypatch.setattr(state_check, "begins_alike", lambda *_: True)
    found = [answers(model.llm, [prompts(kind)[number]], [GREEDY])[0] for number in (0, 2)]
    assert found == [model.expected[0]] * 2
    model.llm.reset_prefix_cache()


CUT = {
    "qwen3_vl": {"recompute": 7, "swap": 16, "recompute bfloat16": 7},
    # An image of 16 tokens is never cut.
    "gemma3": {"swap": 16, "recompute": 19, "swap bfloat16": 19},
    "gemma4": {"swap": 100, "recompute": 64},
    "gemma4_unified": {"recompute": 64},
    "qwen3_5": {"recompute": 7, "swap": 16},
    **{kind: {"recompute": 7} for kind in OTHER_KINDS if kind != "gemma4_unified"},
}
"""Modes of preemption, perhaps with a dtype, and tokens of a step."""


@pytest.mark.gate("gemma3 swap")
@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize(
    ("kind", "manner", "num_tokens"),
    [
        pytest.param(kind, *each, id=name, marks=pytest.mark.matrix if name == "qwen3_5 recompute" else ())
        for kind in KINDS
        for each in CUT[kind].items()
        for name in [f"{kind} {each[0]}"]
    ],
)
def test_cut_and_preempted_prompts_have_the_bits_of_alone(
    kind: str, manner: str, num_tokens: int, models: Models, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    mode, dtype = [*manner.split(), "float32"][:2]
    model = models(kind, dtype)
    options = small(model, dtype=dtype, max_num_batched_tokens=num_tokens, **MODES[mode])
    with noted_rows() as found, opened(kind, **options) as llm:
        assert answers(llm, prompts(kind), PARAMS) == model.expected
        counters = llm.llm_engine.counters
        assert counters.num_preemptions > 0
        assert bool(counters.num_swapped_in) == (mode == "swap")
    assert found == model.rows


def as_trl_syncs(llm: LLM, named: list[tuple[str, Any]], *, sleeps: bool) -> None:
    """Weights from the trainer, one by one, in the calls of TRL's colocate mode."""
    if sleeps:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
    for pair in named:
        llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([pair])
    llm.reset_prefix_cache()
    if sleeps:
        llm.wake_up(tags=["kv_cache"])


@torch.no_grad()
def update_tower(model: Any, seed: int) -> None:
    """Stands for an optimiser's step, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".visual." in name:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.guarantee("A trainer's tower encodes the next rows", is_control_inside=True)
def test_trainers_weights_of_a_tower_take_effect():
    """The form of TRL's calls: ids with all image tokens, a list of images, parameters by their names in the model."""
    kind, model = "qwen3_vl", deepcopy(image_reference("qwen3_vl"))
    bias = {image_token_id(kind): -100.0}
    rollout = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, logprobs=0, logit_bias=bias)
    with opened(kind) as llm:
        [[ids, _]] = answers(llm, [prompt_of(kind, PICTURES)], [GREEDY])
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": list(PICTURES)}}
        [before] = llm.generate([prompt], rollout, use_tqdm=False)
        for sleeps in (False, True):
            update_tower(model, seed=int(sleeps))
            as_trl_syncs(llm, list(model.named_parameters()), sleeps=sleeps)
            [after] = llm.generate([prompt], rollout, use_tqdm=False)
            chosen = after.outputs[0].token_ids
            found = [each[token].logprob for token, each in zip(chosen, after.outputs[0].logprobs, strict=True)]
            theirs = their_logprobs(model, kind, PICTURES, ids, chosen)
            assert (after.num_cached_tokens, llm.score_tokens(prompt, [chosen])) == (0, [found])
            assert (torch.tensor(found) - theirs).abs().mean() < 2e-6
            old = [next(iter(each.values())).logprob for each in before.outputs[0].logprobs]
            others = their_logprobs(model, kind, PICTURES, ids, before.outputs[0].token_ids)
            assert (torch.tensor(old) - others).abs().mean() > 1e-3, "negative control"
            before = after


@pytest.mark.guarantee("Vectors of images are those of transformers", is_control_inside=True)
def test_vectors_of_images_are_those_of_transformers(tmp_path: Path):
    """The shape of Qwen3-VL-Embedding: the normalised last hidden state of the last token; in calls and in rows."""
    kind, talk = "qwen3_vl", [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    chat = f"<user>{PLACEHOLDERS[kind].written}What?"
    expected = [their_vector(kind, PICTURES, text_of(kind, 2)), their_vector(kind, PICTURES[:1], chat)]
    with opened(kind, runner="pooling", max_num_batched_tokens=16) as llm:
        given = [prompt_of(kind, PICTURES), prompt_of(kind, PICTURES[:1], chat), prompt_of(kind, OTHERS)]
        found = [torch.tensor(each.outputs.embedding) for each in llm.embed(given, use_tqdm=False)]
    for ours, theirs in zip(found, expected):
        assert (ours - theirs).abs().max() < 2e-5
    assert (found[2] - expected[0]).abs().max() > 1e-2, "negative control: another picture behind the same ids"
    (tmp_path / "a.png").write_bytes(saved(PICTURES[0]))
    options, asked = {"max_model_len": 192, "runner": "pooling"}, [{"embed": {"messages": talk}, "images": ["a.png"]}]
    (row,) = answers_of_job(tmp_path, image_folder(kind), asked, options=options, media_root=tmp_path)
    assert (torch.tensor(row["embedding"]) - expected[1]).abs().max() < 2e-5


def test_image_larger_than_a_step_is_refused_whole():
    with opened("gemma3", max_num_batched_tokens=15) as llm:
        with pytest.raises(PromptsRefusedError, match="max_num_batched_tokens"):
            answers(llm, prompts("gemma3")[:1], [GREEDY])
        assert len(answers(llm, prompts("gemma3")[1:2], [GREEDY])) == 1


def main(kind: str, folder: Path, **layout: Any) -> None:
    """A rank's report: answers, and digests of rows."""
    with noted_rows() as rows, opened(kind, **layout) as llm:
        rank = llm.llm_engine.engine_channel.rank
        found = answers(llm, prompts(kind), PARAMS)
        (folder / str(rank)).write_text(json.dumps([found, rows, long_answers(llm, kind)]))


def long_answers(llm: LLM, kind: str) -> list[Any]:
    """The first prompts with images, for longer than they are compared with transformers."""
    params = SamplingParams(temperature=0, max_tokens=NUM_LONG, logprobs=1, ignore_eos=True)
    return answers(llm, [prompts(kind)[number] for number in (0, 2, 3)], [params] * 3)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    # Rows are added behind the first three layers.
    "pipeline": {"pipeline_parallel_size": 2, "pipeline_layers": [3, 1]},
    "data": {"data_parallel_size": 2},
}


IN_LAYOUTS = {("qwen3_vl", "tensor"), ("qwen3_vl", "pipeline")}


@pytest.mark.gate("qwen3_vl-tensor")
@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, name, marks=pytest.mark.matrix if (kind, name) in IN_LAYOUTS else pytest.mark.stress)
        for kind, name in [
            *product(WHOLE_KINDS, LAYOUTS),
            *product(
                (
                    "qwen2_vl",
                    "llava_next",
                    "glm4v",
                    "glm4v_moe",
                    "glm_ocr",
                    "paddleocr_vl",
                    "kimi_k25",
                    "granite_docling",
                    "exaone4_5",
                    "lfm2_vl",
                    "aya_vision",
                    "minicpmv4_6",
                    "cohere2_vision",
                    "deepseek_vl",
                    "lighton_ocr",
                    "llama4",
                    "gemma4_clipped",
                ),
                ("tensor",),
            ),
            ("granite_docling", "pipeline"),
            ("lfm2_vl", "pipeline"),
        ]
    ],
)
def test_two_ranks_answer_as_one(kind: str, layout: str, models: Models, tmp_path: Path):
    model = models(kind)
    ranks.run_forked([__file__, kind, tmp_path, json.dumps(LAYOUTS[layout])], 2, timeout_s=240).checked()
    (first, first_rows, first_long), (second, second_rows, second_long) = (
        json.loads(each.read_text()) for each in sorted(tmp_path.iterdir())
    )
    assert (first, first_long) == (second, second_long)
    assert {**first_rows, **second_rows} == model.rows
    if layout == "tensor":
        assert first_rows == second_rows
        assert are_close(first, model.expected)
        if kind.startswith("gemma"):
            assert are_close(first_long, json.loads(json.dumps(long_answers(model.llm, kind))), NUM_LONG)
    else:
        assert first == model.expected


def are_close(found: list[Any], expected: list[Any], num_tokens: int = NUM_TOKENS) -> bool:
    """Whether prompts are the same, and the first greedy ids with their log-probabilities almost: two tensor ranks add
    in another order, which samples may show sooner or later.
    """
    if [each[0] for each in found] != [each[0] for each in expected]:
        return False
    for mine, right in zip(found, expected, strict=True):
        for (first, first_numbers), (second, second_numbers) in zip(mine[1], right[1], strict=True):
            if len(mine[1]) > 1:
                continue
            if first[:num_tokens] != second[:num_tokens]:
                return False
            steps = zip(first_numbers[:num_tokens], second_numbers[:num_tokens], strict=True)
            if any(abs(one[0][1] - other[0][1]) > 2e-3 for one, other in steps):
                return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]))
