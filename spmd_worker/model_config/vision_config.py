"""VisionConfig: how a checkpoint takes images, or audio in their stead, from config.json."""

from dataclasses import dataclass

from spmd_worker.model_config.encoder_part import AudioInput

FRAMES_PER_SECOND = 100
WINDOWS_AT_ONCE = 64
"""Windows of four patches that MiniCPM-V's tower merges at once: each takes a block of attention's."""
Numbers = tuple[float, float, float]
"""One for each channel."""


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Checkpoint names of a tower and its projector. Those of a layer follow `layers` and its index; `mlp` are up and
    down, or gate, up and down. `norms` precede attention and feed-forward; `scales` multiply their outputs. "" or () if
    there is no such tensor. `output_norms` are of the outputs of attention and feed-forward. `aliases` map beginnings
    of names in other files, and in memory, to the ones here, the first that fits. Tensors that match one of the regular
    expressions `unused` are in files and not in the tower.

    A tower of audio has `convolutions` over frames in place of `patches`. Parts of `qkv` that are `unbiased` have no
    bias where the others have. `projector` are the linear layers behind a tower of audio, or the norm and the two
    linear layers inside of a merger of Qwen3-VL's; `added` is the list of its mergers for the text's first layers. They
    are the norm, the merger and the two linear layers of Mistral Large 4.
    """

    beginnings: tuple[str, ...]
    layers: str
    qkv: tuple[str, ...]
    output: str
    norms: tuple[str, str]
    mlp: tuple[str, ...]
    patches: str = ""
    convolutions: tuple[str, ...] = ()
    unbiased: tuple[str, ...] = ()
    positions: str = ""
    class_token: str = ""
    first_norm: str = ""
    last_norm: str = ""
    query_norm: str = ""
    key_norm: str = ""
    scales: tuple[str, ...] = ()
    output_norms: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()
    added: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Sizes of a tower and its projector. `num_layers` are those that run. An image is cut into patches of `patch_size`
    pixels a side, each `num_frames` times. `norm` is "layer" or "rms". Feed-forwards are gated if `is_gated`. Norms of
    queries and keys, if there are any, are of each head if `norms_heads`.

    Positions are a table of `num_positions` rows, or angles to the base `rope_theta`, or both; 0 for none. Squares of
    `crop_size` pixels a side are read one by one if it is above 0. If `max_side` is above 0, images have at most so
    many patches a side, those at the ends perhaps in no token. Layers but `full_layers` see windows of `window_size`
    pixels a side, if it is above 0. The outputs of `added_layers` go to the text too (deepstack).

    `num_kv_heads` heads have keys and values, 0 for as many as queries. A head has `own_head_size` numbers, 0 for a
    share of `hidden_size`; the first `rotary_size` of them turn, 0 for all, as neighbours if it `pairs_neighbours`;
    scores are multiplied by `score_scale`, 0 for the inverse root of a head's numbers. Inputs and outputs of linear
    layers are clipped if it `clips`, rows are shifted and scaled by tables before the projector if it `standardises`
    (Gemma 4).

    The projector: `projector_size` is the width between its two linear layers, 0 if it has one; `num_crop_tokens` is
    the number of tokens of a square. `merge_sizes` are the patches a side of a token for which it has layers, if it has
    them for several (Granite-Docling, MiniCPM-V, whose first `num_unmerged` layers see single patches); tokens are
    normed before them with `norms_tokens`. `pinpoints` are the sizes of pictures made of squares, in pixels, and
    pictures of more than `max_crops` squares are resampled to that (LLaVA-OneVision). `drops_first_row`: the first of a
    square's rows, a class token's, takes no token.
    """

    names: TowerNames
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    activation: str
    eps: float
    norm: str = "layer"
    is_gated: bool = False
    has_qkv_bias: bool = True
    has_bias: bool = True
    has_patch_bias: bool = True
    norms_heads: bool = False
    num_kv_heads: int = 0
    num_frames: int = 1
    num_positions: int = 0
    rope_theta: float = 0.0
    crop_size: int = 0
    max_side: int = 0
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    added_layers: tuple[int, ...] = ()
    drops_first_row: bool = False
    own_head_size: int = 0
    rotary_size: int = 0
    pairs_neighbours: bool = False
    score_scale: float = 0.0
    clips: bool = False
    standardises: bool = False
    projector_size: int = 0
    projector_activation: str = "gelu"
    projector_has_bias: bool = True
    projector_eps: float = 1e-6
    num_crop_tokens: int = 0
    merge_sizes: tuple[int, ...] = ()
    num_unmerged: int = 0
    norms_tokens: bool = False
    pinpoints: tuple[tuple[int, int], ...] = ()
    max_crops: int = 0

    @property
    def head_size(self) -> int:
        return self.own_head_size or self.hidden_size // self.num_heads

    @property
    def num_key_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.num_kv_heads or self.num_heads

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        return self.score_scale or float(self.head_size**-0.5)

    @property
    def padded_head_size(self) -> int:
        """Size of a head in attention, which takes multiples of 16: the numbers after its own are 0."""
        return -(-self.head_size // _HEAD_SIZE_STEP) * _HEAD_SIZE_STEP

    @property
    def num_patch_numbers(self) -> int:
        return 3 * self.num_frames * self.patch_size**2


_HEAD_SIZE_STEP = 16


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`kind` is a row of `families/vision_rows.py`, `image_token_id` the id of tokens that take rows; those of
    frames of a video have `video_token_id`, None in a model that takes none. Behind each of
    the first `num_added` layers rows are added to the residual stream. `merge_size` patches a side make a token.
    `has_three_positions`: tokens of an image have positions of time, line and column. `sees_whole_image`: tokens of an
    image attend to all of it, with `sees_in_windows` in layers with a window alone. In a model whose layers have inputs
    of their own (`ModelConfig.num_layer_inputs`) tokens of images take those of `input_token_id`. With `run_length`
    above 1 positions of the first tokens of runs are needed too (`IndexerConfig`). `tower` is None if
    rows are made elsewhere, as in tests. Pixels are normalised by `image_mean` and `image_std` after `rescale_factor`,
    in bfloat16 with `has_bfloat16_pixels`; with `scales_levels` mean and deviation are scaled instead, to
    levels of 0 to 255, which gives other last bits.

    `audio`: the model hears, and its prompts have audio where those of others have images. Each token then has
    `merge_size` rows of the convolutions. `beside` is the audio of a model that takes images and audio.
    """

    kind: str
    image_token_id: int
    video_token_id: int | None = None
    num_added: int = 0
    merge_size: int = 1
    has_three_positions: bool = False
    sees_whole_image: bool = False
    sees_in_windows: bool = False
    input_token_id: int = 0
    run_length: int = 1
    tower: TowerConfig | None = None
    image_mean: Numbers = (0.5, 0.5, 0.5)
    image_std: Numbers = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    has_bfloat16_pixels: bool = False
    scales_levels: bool = False
    audio: AudioInput | None = None
    beside: "VisionConfig | None" = None

    @property
    def parts(self) -> "tuple[VisionConfig, ...]":
        """This and what is beside it, one for each tower."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def hearing(self) -> "VisionConfig | None":
        """The part that hears; None if the model takes images alone."""
        return next((each for each in self.parts if each.audio is not None), None)

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.audio is None

    def most_audio_tokens(self, max_audio_s: int) -> int:
        """The most tokens of a recording, of at most `max_audio_s` where the model hears any length."""
        assert self.audio is not None, "the model hears"
        if not (self.audio.chunk_frames or self.audio.window_frames):
            return self.audio.num_frames // 2 // self.merge_size
        num_frames = min(self.audio.num_frames, max_audio_s * FRAMES_PER_SECOND)
        if self.audio.window_frames:
            return -(-num_frames // self.audio.window_frames) * (self.audio.num_rows // self.merge_size)
        return -(-num_frames // self.audio.chunk_frames) * self.audio.num_chunk_rows

    @property
    def medium(self) -> str:
        """Either "image" or "audio"."""
        return "image" if self.audio is None else "audio"
