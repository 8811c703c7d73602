import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_files import entry, save_indexed, save_single, write_index, write_raw

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import TensorView
from spmd_worker.model.weights.checkpoint import Checkpoint

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rectangle(shape, dim=None, start=0, stop=0):
    return tuple((start, stop) if d == dim else (0, size) for d, size in enumerate(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (4, 3, 5), (0, 3), (3, 5000), (2, 3, 2500)])
def test_slices_of_every_dimension_equal_torch_indexing(tmp_path, dtype, shape):
    expected = tensor(*shape, dtype=dtype)
    with Checkpoint.open(save_single(tmp_path, {"w": expected, "other": tensor(3)})) as checkpoint:
        assert checkpoint.dtype("w") == dtype
        assert checkpoint.shape("w") == shape
        assert torch.equal(checkpoint.read("w", rectangle(shape)), expected)
        for dim, size in enumerate(shape):
            for start, stop in [(0, size // 2), (size // 2, size), (size, size), (size // 3, size // 3 + min(size, 1))]:
                found = checkpoint.read("w", rectangle(shape, dim, start, stop))
                assert found.dtype == dtype
                assert torch.equal(found, expected.narrow(dim, start, stop - start))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_rectangle_equals_torch_indexing(tmp_path, data):
    expected = tensor(4, 3, 2000)
    checkpoint = Checkpoint.open(save_single(tmp_path, {"w": expected}))
    region = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size))
        region.append((start, data.draw(st.integers(start, size))))
    assert torch.equal(checkpoint.read("w", tuple(region)), expected[tuple(slice(*bounds) for bounds in region)])
    checkpoint.close()


def test_read_tensor_is_writable_and_independent_of_file(tmp_path):
    folder = save_single(tmp_path, {"w": tensor(4, 4)})
    before = (folder / "model.safetensors").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpoint.open(folder) as checkpoint:
            found = checkpoint.read("w", rectangle((4, 4)))
        found.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_reads_only_its_share_of_bytes(tmp_path, dim):
    shape = (64, 4096)
    folder = save_single(tmp_path, {"w": tensor(*shape)})
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.read("w", rectangle(shape, dim, shape[dim] // 2, shape[dim]))
        assert checkpoint.num_bytes_read == 64 * 4096 * 4 // 2


def test_empty_region_reads_nothing(tmp_path):
    with Checkpoint.open(save_single(tmp_path, {"w": tensor(4, 4)})) as checkpoint:
        assert checkpoint.read("w", ((2, 2), (0, 4))).shape == (0, 4)
        assert checkpoint.num_bytes_read == 0


def test_files_are_opened_at_first_read_only(tmp_path):
    def num_open():
        opened = (os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd"))
        return sum(path.startswith(str(tmp_path)) for path in opened)

    checkpoint = Checkpoint.open(save_indexed(tmp_path, {f"{x}.safetensors": {x: tensor(2)} for x in "abc"}))
    assert num_open() == 0
    for name in ("a", "a", "b"):
        checkpoint.read(name, ((0, 2),))
    assert num_open() == 2
    checkpoint.close()
    assert num_open() == 0
    assert torch.equal(checkpoint.read("c", ((0, 2),)), tensor(2))
    checkpoint.close()


def test_index_locates_each_tensor(tmp_path):
    files = {
        "model-00001-of-00002.safetensors": {"a": tensor(3, seed=1), "b": tensor(4, seed=2)},
        "model-00002-of-00002.safetensors": {"c": tensor(5, seed=3)},
    }
    with Checkpoint.open(save_indexed(tmp_path, files)) as checkpoint:
        assert checkpoint.names() == ["a", "b", "c"]
        assert checkpoint.shapes() == {"a": (3,), "b": (4,), "c": (5,)}
        assert torch.equal(checkpoint.read("c", ((0, 5),)), tensor(5, seed=3))


def test_files_may_be_symlinks(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    save_indexed(blobs, {"x.safetensors": {"a": tensor(3)}})
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    with Checkpoint.open(snapshot) as checkpoint:
        assert torch.equal(checkpoint.read("a", ((0, 3),)), tensor(3))


@pytest.mark.parametrize(
    "file_name",
    [
        "../x.safetensors",
        "sub/x.safetensors",
        "/etc/x.safetensors",
        "sub\\x.safetensors",
        "x\0.safetensors",
        ".x.safetensors",
        "..",
        "",
        "x.bin",
        "x" * 300 + ".safetensors",
        3,
        None,
    ],
)
def test_index_cannot_name_file_outside_the_folder(tmp_path, file_name):
    save_single(tmp_path / "sub", {"a": tensor(1)})
    save_single(tmp_path, {"a": tensor(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": file_name})
    with pytest.raises(CheckpointError, match=r"'a': .*must .*plain name"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "x.safetensors"}, r"'b' .*index says nothing"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"}, "'c' is not in x.safetensors"),
        ({"a": "x.safetensors", "b": "gone.safetensors"}, r"names gone\.safetensors, .*not"),
        ({}, "weight_map must be an object"),
        (["a"], "weight_map must be an object"),
        (None, "weight_map must be an object"),
    ],
)
def test_index_and_headers_must_agree_both_ways(tmp_path, weight_map, words):
    save_indexed(tmp_path, {"x.safetensors": {"a": tensor(1), "b": tensor(2)}})
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_tensor_in_two_files_is_rejected(tmp_path):
    files = {"x.safetensors": {"a": tensor(1)}, "y.safetensors": {"a": tensor(1), "b": tensor(1)}}
    save_indexed(tmp_path, files)
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/y\.safetensors: .*'a' .*index says x\.safetensors"):
        Checkpoint.open(tmp_path)


def test_two_tensors_of_one_name_are_rejected(tmp_path):
    """Once the later one won silently."""
    files = {"a.gamma": tensor(2, seed=1), "a.weight": tensor(2, seed=2), "b.gamma": tensor(2)}
    with Checkpoint.open(save_single(tmp_path, files)) as checkpoint:
        checkpoint.rename(lambda name, shape: {name.replace("b.gamma", "b.weight"): None})
        with pytest.raises(CheckpointError, match=r"'a\.gamma' and 'a\.weight' .*same weight"):
            checkpoint.rename(lambda name, shape: {name.replace("gamma", "weight"): None})
        assert checkpoint.names() == ["a.gamma", "a.weight", "b.weight"]
        assert checkpoint.stored_name("b.weight") == "b.gamma"


def test_tensor_also_inside_another_is_rejected(tmp_path):
    """Separate experts next to the stack of all of them."""
    files = {"experts": tensor(2, 4, 3), "experts.1": tensor(4, 3)}

    def parts(name, shape):
        return (
            {f"experts.{number}": TensorView("experts", number, (0, 4)) for number in range(2)}
            if name == "experts"
            else {name: None}
        )

    with (
        Checkpoint.open(save_single(tmp_path, files)) as checkpoint,
        pytest.raises(CheckpointError, match=r"'experts' and 'experts\.1' .*same "),
    ):
        checkpoint.rename(parts)


def test_tensor_bytes_are_read_in_any_shape(tmp_path):
    stored = torch.arange(24, dtype=torch.float32).bfloat16().view(12, 2)
    checkpoint = Checkpoint.open(save_single(tmp_path, {"packed": stored, "experts": torch.ones(2, 4, 3)}))
    shape = 6, checkpoint.num_bytes("packed") // 6
    found = checkpoint.read_bytes("packed", shape, ((2, 5), (1, 7)))
    assert torch.equal(found, stored.view(torch.uint8).view(shape)[2:5, 1:7])
    checkpoint.rename(lambda name, _: {f"{name}.0": TensorView(name, 0, (0, 4)) if name == "experts" else None})
    with pytest.raises(CheckpointError, match=r"'experts\.0' is a part of the tensor 'experts'"):
        checkpoint.num_bytes("experts.0")


def test_duplicate_name_in_index_is_rejected(tmp_path):
    save_single(tmp_path, {"a": tensor(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    text = '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: .*strict JSON: .*'a' .*twice"):
        Checkpoint.open(tmp_path)


@pytest.mark.guarantee("No pickle, no eval; .bin refused")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_rejected(tmp_path, name):
    (tmp_path / name).write_bytes(b"never opened")
    with pytest.raises(CheckpointError, match="can run code") as error_result:
        Checkpoint.open(tmp_path)
    assert name in str(error_result.value)
    assert "convert them to safetensors" in str(error_result.value)


def test_pickles_next_to_safetensors_are_ignored(tmp_path):
    save_single(tmp_path, {"a": tensor(1)})
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert Checkpoint.open(tmp_path).names() == ["a"]


def test_folder_without_weights_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    save_single(tmp_path, {"a": tensor(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "part-1.safetensors")
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors without an index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "I64", "BOOL"])
def test_quantised_tensor_is_rejected_only_when_read(tmp_path, dtype):
    num_bytes = 16 if dtype == "I64" else 2
    header = {"q": entry(dtype, [2], 0, num_bytes), "w": entry("F32", [1], num_bytes, num_bytes + 4)}
    write_raw(tmp_path / "model.safetensors", header, bytes(num_bytes + 4))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("w", ((0, 1),)).item() == 0.0
    with pytest.raises(CheckpointError, match=f"dtype {dtype}.*quantization_config"):
        checkpoint.read("q", ((0, 2),))


def test_unknown_name_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        Checkpoint.open(save_single(tmp_path, {"a": tensor(1)})).shape("b")


def test_shrunk_file_is_an_error_and_no_signal(tmp_path):
    path = save_single(tmp_path, {"a": tensor(1024), "b": tensor(1024)}) / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.read("a", ((0, 1024),))
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"'b': .*file ends at \d+,"):
        checkpoint.read("b", ((0, 1024),))
    checkpoint.close()
    with pytest.raises(CheckpointError, match="bytes now"):
        checkpoint.read("a", ((0, 1024),))
