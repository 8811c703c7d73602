"""Subjects of `gpu_sweep.py` of models with latent attention or recurrent states, beside those of gpu_tiles.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self
from unittest import mock

import torch
from gpu_tiles import SUBJECTS, Calls, Kind, Subject, random
from torch import Tensor

from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.recurrent import DeltaRates, MambaRates, StateSegments
from spmd_worker.ops.kernels.triton import attention, scan_delta_kernels, scan_mamba_kernels
from spmd_worker.ops.kernels.triton.scan_delta import scan_delta
from spmd_worker.ops.kernels.triton.scan_mamba import scan_mamba

BLOCK = 16


@dataclass(frozen=True)
class Latents(Subject):
    """Latent attention of complete prompts: `attention.many_tile` for keys of more than 512 numbers."""

    kind: ClassVar[str] = "latent"
    heads: int
    size: int
    value_size: int
    count: int
    length: int

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        if is_dry:
            return [cls("latent tiny", 16, 48, 32, 1, 20)]
        return [
            cls("latent deepseek v3, 1 x 2048", 128, 576, 512, 1, 2048),
            cls("latent mistral 4, 2 x 1024", 32, 320, 256, 2, 1024),
        ]

    def candidates(self, device: torch.device) -> list[attention.Tile]:
        group, of = self.heads // attention.latent_groups(self.heads), attention.Tile
        if device.type == "cpu":
            return [attention.many_tile((0, 0), self.size, group, 2), of(32, 4, 1, 1)]
        today = attention.many_tile(torch.cuda.get_device_capability(device), self.size, group, 2)
        found = [of(64, 8, 2, 1), of(64, 8, 1, 1), of(16, 8, 2, 1), of(32, 8, 2, 1), of(64, 4, 2, 1)]
        if self.size <= 512:
            found += [of(64, 8, 3, 1), of(64, 8, 1, 2), of(128, 8, 2, 1), of(128, 8, 1, 1)]
        return list(dict.fromkeys([today, *found]))

    def operands(self, device: torch.device, num_copies: int) -> Any:
        del num_copies
        num_blocks, total = -(-self.length // BLOCK), self.count * self.length
        order = torch.randperm(self.count * num_blocks, generator=torch.Generator().manual_seed(1))
        tables = order.view(self.count, num_blocks).to(device)
        positions = torch.arange(self.length, device=device).repeat(self.count)
        blocks = tables[torch.arange(self.count, device=device).repeat_interleave(self.length), positions // BLOCK]
        starts = tuple(range(0, total + 1, self.length))
        metadata = AttentionMetadata(starts, (self.length,) * self.count, tables, blocks, positions % BLOCK)
        shape = TritonBackend().block_shape(1, BLOCK, self.size, has_values=False)
        return random(device, total, self.heads, self.size), random(device, len(order), *shape), metadata

    def calls(self, operands: Any, candidate: attention.Tile) -> Calls:
        queries, cache, metadata = operands
        sizes = {"scale": self.size**-0.5, "window": 0, "value_size": self.value_size}
        call = partial(TritonBackend().attend, queries, cache, metadata, **sizes)
        with mock.patch.object(attention, "many_tile", return_value=candidate):
            # The first call plans, and what is planned keeps its tile.
            call()
        return [call]

    def work(self) -> tuple[float, float]:
        pairs = self.count * self.heads * self.length * (self.length + 1) / 2
        return 0.0, 2.0 * pairs * (self.size + self.value_size)


class ScanTile(NamedTuple):
    """Columns, or rows, of a tile, and its warps."""

    size: int
    num_warps: int


@dataclass(frozen=True)
class Scans(Subject):
    """Scans of rows that begin, so that no call depends on the one before: `scan_delta_kernels.BV` and `SCAN`,
    `scan_mamba_kernels.BP` and `LAUNCH`.
    """

    kind: ClassVar[str] = "scans"
    heads: int
    groups: int
    sizes: tuple[int, ...]
    is_mamba: bool
    count: int
    length: int

    def __post_init__(self) -> None:
        # JSON has lists.
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def kernel_key(self, candidate: ScanTile) -> object:
        return self.kind, self.sizes, self.is_mamba, candidate

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        if is_dry:
            return [cls("scans tiny", 2, 1, (16, 16), False, 2, 3), cls("scans tiny mamba", 2, 1, (8, 16), True, 2, 3)]
        models = {"qwen3.5 9b": (32, 16, (128, 128), False), "falcon h1": (24, 1, (128, 256), True)}
        return [
            cls(f"scans {name}, {count} x {length}", *shape, count, length)
            for name, shape in models.items()
            for count, length in ((1, 2048), (256, 1))
        ]

    def candidates(self, device: torch.device) -> list[ScanTile]:
        today = ScanTile(scan_delta_kernels.BV, scan_delta_kernels.SCAN["num_warps"])
        if self.is_mamba:
            today = ScanTile(scan_mamba_kernels.BP, scan_mamba_kernels.LAUNCH["num_warps"])
        tiles = ((4, 1), (8, 1), (16, 1), (8, 2), (16, 2), (16, 4), (32, 4))
        return list(dict.fromkeys([today, *(ScanTile(*each) for each in tiles)]))

    @property
    def config(self) -> DeltaConfig | MambaConfig:
        if self.is_mamba:
            return MambaConfig(self.heads, self.sizes[0], self.groups, self.sizes[1], 1e-6)
        return DeltaConfig(self.groups, self.heads, *self.sizes, 1e-6)

    def operands(self, device: torch.device, num_copies: int) -> Any:
        del num_copies
        config, total = self.config, self.count * self.length
        steps = [random(device, total, self.heads) for _ in range(1 if self.is_mamba else 2)]
        gates = [random(device, self.heads, dtype=torch.float32) for _ in range(3 if self.is_mamba else 2)]
        states = random(device, self.count, self.heads, *self.sizes, dtype=torch.float32)
        numbers = torch.arange(self.count + 1, dtype=torch.int32, device=device)
        segments = StateSegments(numbers[:-1], numbers * self.length, torch.zeros_like(numbers[:-1]))
        rates = (MambaRates if self.is_mamba else DeltaRates)(*steps, *gates)
        return random(device, total, config.num_channels), rates, states, segments, config

    def calls(self, operands: Any, candidate: ScanTile) -> Calls:
        module, size, options = (scan_delta_kernels, "BV", "SCAN")
        if self.is_mamba:
            module, size, options = (scan_mamba_kernels, "BP", "LAUNCH")
        scan: Callable[..., Tensor] = scan_mamba if self.is_mamba else scan_delta
        chosen = {**getattr(module, options), "num_warps": candidate.num_warps}

        def launch() -> Tensor:
            with mock.patch.multiple(module, **{size: candidate.size, options: chosen}):
                return scan(*operands)

        return [launch]

    def work(self) -> tuple[float, float]:
        return 4.0 * self.count * self.heads * self.sizes[0] * self.sizes[1], 0.0


ALL_SUBJECTS = SUBJECTS | {each.kind: Kind(each) for each in (Latents, Scans)}


def subject_of(kind: str, fields: dict[str, Any]) -> Subject:
    """The subject that `asdict` made these fields of."""
    return ALL_SUBJECTS[kind].of(**fields)
