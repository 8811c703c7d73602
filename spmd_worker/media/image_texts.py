"""Texts that stand in a prompt in place of an image's marker, with `num_rows` image tokens each."""

from collections.abc import Sequence

from spmd_worker.media.placeholders import IMAGE_NUMBER, PLACEHOLDERS, SEPARATORS


def run_text(kind: str, num_rows: int) -> str:
    """Image tokens alone."""
    return PLACEHOLDERS[kind].image_token * num_rows


def video_text(kind: str, num_rows: int) -> str:
    """Tokens of frames alone."""
    return PLACEHOLDERS[kind].row_token * num_rows


def gemma_text(num_rows: int) -> str:
    """Line ends around it, which may join with the prompt's."""
    return f"\n\n<start_of_image>{run_text('gemma3', num_rows)}<end_of_image>\n\n"


def gemma4_text(num_rows: int) -> str:
    """A token before and behind the image tokens."""
    return f"<|image>{run_text('gemma4', num_rows)}<image|>"


def internvl_text(num_rows: int) -> str:
    """A token before and behind the image tokens."""
    return f"<img>{run_text('internvl', num_rows)}</img>"


def aya_text(num_tiles: int, rows_per_tile: int) -> str:
    """Tiles with their numbers, and the complete image behind several or alone."""
    tile = run_text("aya_vision", rows_per_tile)
    tiles = "".join([f"TILE_{number}{tile}" for number in range(1, num_tiles)])
    return f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{tile}<|END_OF_IMG|>"


def command_a_text(num_tiles: int, rows_per_tile: int) -> str:
    """Tiles with a break behind each, the last of which is the complete image."""
    tile = f"{run_text('cohere2_vision', rows_per_tile)}<|IMG_LINE_BREAK|>"
    return f"<|START_OF_IMG|>{tile * num_tiles}<|END_OF_IMG|>"


def minicpm_text(slices: Sequence[Sequence[int]], num_rows: int, *, is_numbered: bool) -> str:
    """The complete image of `num_rows`, with its number, and behind it lines of slices, by their numbers of rows."""
    lines = ["".join([f"<slice>{run_text('minicpmv4_6', each)}</slice>" for each in line]) for line in slices]
    before = f"<image_id>{IMAGE_NUMBER}</image_id>" * is_numbered
    return f"{before}<image>{run_text('minicpmv4_6', num_rows)}</image>" + "\n".join(lines)


def pixtral_text(num_lines: int, num_columns: int) -> str:
    """A break between lines, an end behind the last."""
    return "[IMG_BREAK]".join(["[IMG]" * num_columns] * num_lines) + "[IMG_END]"


def llama4_text(num_lines: int, num_columns: int, rows_per_tile: int) -> str:
    """Tiles with a token between those of a line and one behind each, and the complete image; a tile alone is that."""
    tile, (between, behind) = run_text("llama4", rows_per_tile), SEPARATORS
    lines = (between.join([tile] * num_columns) + behind) * num_lines if num_lines * num_columns > 1 else ""
    return f"<|image_start|>{lines}<|image|>{tile}<|image_end|>"


def smolvlm_text(num_lines: int, num_columns: int, rows_per_tile: int) -> str:
    """Tiles line by line, with their places, and the complete image; without tiles this alone."""
    tile = run_text("smolvlm", rows_per_tile)
    tiles = _lines_text(num_lines, num_columns, tile) + "\n" * bool(num_lines)
    return f"{tiles}<fake_token_around_image><global-img>{tile}<fake_token_around_image>"


def _lines_text(num_lines: int, num_columns: int, tile: str) -> str:
    return "".join(
        [
            "".join([f"<fake_token_around_image><row_{line + 1}_col_{each + 1}>{tile}" for each in range(num_columns)])
            + "\n"
            for line in range(num_lines)
        ]
    )


def granite_text(num_lines: int, num_columns: int, rows_per_tile: int) -> str:
    """Tiles line by line, with their places, and behind several the complete image."""
    tile = run_text("granite_docling", rows_per_tile)
    lines = _lines_text(num_lines, num_columns, tile)
    behind = f"\n<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    return lines + behind * (num_lines * num_columns > 1)


def lfm2_text(num_lines: int, num_columns: int, rows_per_tile: int, num_rows: int) -> str:
    """Tiles, if they are several, with their places, and the complete image of `num_rows`."""
    tile = run_text("lfm2_vl", rows_per_tile)
    places = [(line, column) for line in range(num_lines) for column in range(num_columns)]
    tiles = "".join([f"<|img_row_{line + 1}_col_{column + 1}|>{tile}" for line, column in places])
    behind = f"{tiles}<|img_thumbnail|>" if len(places) > 1 else ""
    return f"<|image_start|>{behind}{run_text('lfm2_vl', num_rows)}<|image_end|>"
