"""What others make of the same rows, each in an environment of its own: nothing of this project is imported.

    python peers.py sentence-transformers|openvino MODEL ROWS.jsonl RESULT.json [--dtype float32] [--batch N]
                    [--threads N] [--openvino-model DIR]

Writes one JSON object: seconds, the batch size, resident memory and the first vectors. A batch size that is not given
is the best of 32, 64, 128 and 256 on a sample.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from embed_sides.memory import MemoryMarks

BATCH_SIZES = (32, 64, 128, 256)
NUM_TRIED_ROWS = 4096
NUM_SAMPLE_ROWS = 1000
MAX_TOKENS = 256


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["sentence-transformers", "openvino"])
    for name in ("model", "rows", "result"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--openvino-model", type=Path, help="default: exported beside the result")
    options = parser.parse_args(arguments)
    with options.rows.open(encoding="utf-8") as stream:
        texts = [json.loads(line)["body"]["input"] for line in stream]
    marks = MemoryMarks(len(texts))
    start = start_sentence_transformers if options.peer == "sentence-transformers" else start_openvino
    encode, version = start(options, marks)
    batch = options.batch or best_batch(encode, texts)
    marks.begin()
    began_s = time.perf_counter()
    vectors = encode(texts, batch)
    seconds = time.perf_counter() - began_s
    sample = [[float(x) for x in vectors[index]] for index in range(min(len(texts), NUM_SAMPLE_ROWS))]
    figures = {"peer": f"{options.peer} {version}", "seconds": seconds, "batch": batch, "memory_mib": marks.mib}
    options.result.write_text(json.dumps({**figures, "sample": sample}), encoding="utf-8")
    return 0


Encode = Callable[[list[str], int], Any]
"""Texts and a batch size to vectors in the order of the texts."""


def best_batch(encode: Encode, texts: list[str]) -> int:
    """By the time of some rows, each size once after one for warmth."""
    tried = texts[: min(NUM_TRIED_ROWS, max(len(texts) // 10, 1))]
    encode(tried[: max(len(tried) // 8, 1)], BATCH_SIZES[0])
    spent = {}
    for size in BATCH_SIZES:
        began_s = time.perf_counter()
        encode(tried, size)
        spent[size] = time.perf_counter() - began_s
    return min(BATCH_SIZES, key=spent.__getitem__)


def start_sentence_transformers(options: argparse.Namespace, marks: MemoryMarks) -> tuple[Encode, str]:
    """Its own `encode`, which sorts by length and pads each batch."""
    import sentence_transformers
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    model = sentence_transformers.SentenceTransformer(
        str(options.model), device="cpu", model_kwargs={"dtype": options.dtype}
    )
    forward = model.forward

    def counted(features: Any, *given: Any, **named: Any) -> Any:
        found = forward(features, *given, **named)
        marks.add(len(features["input_ids"]))
        return found

    model.forward = counted

    def encode(texts: list[str], batch: int) -> Any:
        return model.encode(texts, batch_size=batch, show_progress_bar=False)

    return encode, sentence_transformers.__version__


def start_openvino(options: argparse.Namespace, marks: MemoryMarks) -> tuple[Encode, str]:
    """`TextEmbeddingPipeline`, given batches that are sorted by length as sentence-transformers sorts them."""
    import openvino_genai

    folder = options.openvino_model or options.result.with_name("openvino-model")
    if not (folder / "openvino_model.xml").exists():
        export_openvino(options.model, folder)
    config = openvino_genai.TextEmbeddingPipeline.Config()
    config.pooling_type = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN
    config.normalize = True
    config.max_length = MAX_TOKENS
    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[options.dtype]
    hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "THROUGHPUT"}
    if options.threads:
        hints["INFERENCE_NUM_THREADS"] = options.threads
    pipeline = openvino_genai.TextEmbeddingPipeline(str(folder), "CPU", config, **hints)

    def encode(texts: list[str], batch: int) -> list[Any]:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), batch):
            indices = order[start : start + batch]
            for index, vector in zip(indices, pipeline.embed_documents([texts[each] for each in indices])):
                vectors[index] = vector
            marks.add(len(indices))
        return vectors

    return encode, openvino_genai.__version__


def export_openvino(model: Path, folder: Path) -> None:
    """Hidden states and tokenizer as OpenVINO reads them; needs torch and transformers in this environment. What
    `optimum-cli export openvino --task feature-extraction --weight-format fp32 MODEL FOLDER` writes does as well.
    """
    import openvino
    import openvino_tokenizers
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    given = dict(tokenizer(["a b", "a b c d"], padding=True, return_tensors="pt"))
    names = list(given)

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *inputs: Any) -> Any:
            return self.network(**dict(zip(names, inputs))).last_hidden_state

    with torch.no_grad():
        converted = openvino.convert_model(States(), example_input=tuple(given[name] for name in names))
    for port, name in zip(converted.inputs, names):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
    converted.outputs[0].get_tensor().set_names({"last_hidden_state"})
    converted.validate_nodes_and_infer_types()
    folder.mkdir(exist_ok=True)
    openvino.save_model(converted, folder / "openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(openvino_tokenizers.convert_tokenizer(tokenizer), folder / "openvino_tokenizer.xml")
    (folder / "config.json").write_text((model / "config.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
