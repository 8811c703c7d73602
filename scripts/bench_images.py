"""Captions of pictures on the CPU: this runtime or transformers, with the shape of Qwen3-VL-2B and random weights.

    python scripts/bench_images.py ours [--size 480x640] [--num-captions 64] [--num-new 32] [--num-layers 28]
    python scripts/bench_images.py transformers ...

Run them in turns. `tower` is the time of one picture's rows alone, the best of three; `captions` all of the rest: for
this runtime from pictures to text, for transformers from prepared pixels, in static batches of 8 equal prompts. Prints
one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer, models, pre_tokenizers

from spmd_worker.media.image_processor import read_image_processor
from spmd_worker.media.patches import normalise, qwen_patches
from spmd_worker.media.prepared import Pixels, PreparedImage
from spmd_worker.media.preparing import prepare
from spmd_worker.model_config.model_config import read_model_files

QUESTION: Final = "<|vision_start|><|image_pad|><|vision_end|>Describe the picture in one sentence."
SPECIAL: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEXT: Final = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_scaling": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
VISION: Final = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
MEAN_AND_STD: Final = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
BATCH_SIZE: Final = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "transformers"))
    parser.add_argument("--size", default="480x640", help="height and width of the pictures")
    parser.add_argument("--num-captions", type=int, default=64, help="pictures, each another one; 0: the tower alone")
    parser.add_argument("--num-new", type=int, default=32, help="tokens of each caption")
    parser.add_argument("--num-layers", type=int, default=28, help="layers of the text")
    parser.add_argument("--num-threads", type=int, default=2)
    return parser.parse_args()


def write_folder(folder: Path, num_layers: int) -> Any:
    """Configuration, tokenizer of bytes, processor; returns transformers' config."""
    import transformers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {f"{kind}_token_id": tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
    text = {**TEXT, "num_hidden_layers": num_layers}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **ids)
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], "bfloat16"
    config.save_pretrained(folder)
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    processor = {"patch_size": 16, "image_mean": MEAN_AND_STD[0], "image_std": MEAN_AND_STD[1], "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return config


def pictures(size: str, count: int) -> list[Pixels]:
    height, width = map(int, size.split("x"))
    chance = np.random.default_rng(0)
    return [chance.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]


def best_of_three(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def run_ours(folder: Path, given: argparse.Namespace) -> tuple[float, float]:
    from spmd_worker import LLM, SamplingParams

    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 64, "num_blocks": 4096}
    limits = {"max_image_tokens": 4096}
    with LLM(str(folder), device="cpu", dtype="bfloat16", max_num_batched_tokens=4096, **options, **limits) as llm:
        (one,) = prepared(folder, pictures(given.size, 1))
        tower = timed_tower(llm.llm_engine.model_executor.driver_worker.worker.get_model(), one)
        params = SamplingParams(temperature=0, max_tokens=given.num_new, ignore_eos=True)
        prompts = [{"prompt": QUESTION, "multi_modal_data": {"image": each}} for each in asked(given)]
        start = time.perf_counter()
        if prompts:
            llm.generate(prompts, params, use_tqdm=False)
        return tower, time.perf_counter() - start


def timed_tower(model: Any, image: PreparedImage) -> float:
    from spmd_worker.native.threads import single_threaded_torch

    with torch.inference_mode(), single_threaded_torch():
        return best_of_three(lambda: model.tower(image.pixels))


def run_theirs(folder: Path, given: argparse.Namespace, config: Any) -> tuple[float, float]:
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        (one,) = prepared(folder, pictures(given.size, 1))
        patches, grid = inputs_of([one])
        tower = best_of_three(lambda: model.model.visual(patches, grid_thw=grid))
        images = prepared(folder, asked(given))
        start = time.perf_counter()
        for first in range(0, len(images), BATCH_SIZE):
            some = images[first : first + BATCH_SIZE]
            ids = [tokenizer.encode(QUESTION.replace("<|image_pad|>", each.text)).ids for each in some]
            patches, grid = inputs_of(some)
            token_ids = torch.tensor(ids)
            model.generate(
                input_ids=token_ids,
                attention_mask=torch.ones_like(token_ids),
                mm_token_type_ids=(token_ids == config.image_token_id).int(),
                pixel_values=patches,
                image_grid_thw=grid,
                max_new_tokens=given.num_new,
                min_new_tokens=given.num_new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return tower, time.perf_counter() - start


def asked(given: argparse.Namespace) -> list[Pixels]:
    return pictures(given.size, given.num_captions)


def prepared(folder: Path, images: list[Pixels]) -> list[PreparedImage]:
    vision = read_model_files(folder, with_images=True).model_config.vision
    assert vision is not None, "of a model that takes images"
    processor = read_image_processor(folder, vision)
    return [prepare(each, processor, is_alone=True) for each in images]


def inputs_of(images: list[PreparedImage]) -> tuple[torch.Tensor, torch.Tensor]:
    patches = [qwen_patches(normalise(each.pixels.crops[0], *MEAN_AND_STD), 16, 2) for each in images]
    grid = torch.tensor([[1, *each.pixels.grid] for each in images])
    return torch.from_numpy(np.concatenate(patches)).bfloat16(), grid


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.num_threads)
    with tempfile.TemporaryDirectory() as name:
        config = write_folder(Path(name), given.num_layers)
        run = run_ours(Path(name), given) if given.side == "ours" else run_theirs(Path(name), given, config)
        num_rows = prepared(Path(name), pictures(given.size, 1))[0].num_rows
    figures = {"tower_s": round(run[0], 2), "captions_s": round(run[1], 1), "rows": num_rows, **vars(given)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
