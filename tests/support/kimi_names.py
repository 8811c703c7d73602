"""Names of Kimi K2.5's tensors as its authors' files have them, from files that transformers writes."""

from pathlib import Path

from safetensors.torch import load_file, save_file

WRITTEN = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
"""Names that transformers writes -> those of the files."""


def restore_layers(path: Path) -> None:
    """Rename tensors of the text, as transformers renames all that has the name of a layer of the vision tower, and one
    of the tower.
    """
    tensors = load_file(path)
    for written, name in WRITTEN.items():
        tensors = {each.replace(written, name): tensor for each, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
