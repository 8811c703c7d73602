"""VisionConfig: how a checkpoint takes images, from config.json."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`kind` is a row of `families/vision_rows.py`, `image_token_id` the id of tokens that take rows. Behind each of
    the first `num_added` layers rows are added to the residual stream. `merge_size` patches a side make a token.
    `has_three_positions`: tokens of an image have positions of time, line and column. `sees_whole_image`: tokens of an
    image attend to all of it.
    """

    kind: str
    image_token_id: int
    num_added: int = 0
    merge_size: int = 1
    has_three_positions: bool = False
    sees_whole_image: bool = False
