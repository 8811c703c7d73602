"""Memory of tokens that choose their keys: as much is planned as a step takes, by scores or by copies of keys."""

from dataclasses import replace

import pytest
from allocated import peak_bytes
from latent_checkpoints import latent_folder
from our_model import Run, load_model

from spmd_worker.model.layers.choice_bytes import choice_bytes
from spmd_worker.model_config.model_config import DTYPE_BYTES, ModelConfig, read_model_files
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import activation_bytes

NUM_TOKENS = 80


def config_of(name: str, num_keys: int, num_chosen: int) -> ModelConfig:
    """The configuration of a case for rows of so many keys, of which each token sees as many as are chosen."""
    config = read_model_files(latent_folder(name)).model_config
    layers = []
    for layer in config.layers:
        assert layer.latent is not None
        assert layer.latent.indexer is not None
        indexer = replace(layer.latent.indexer, num_chosen=num_chosen)
        layers.append(replace(layer, latent=replace(layer.latent, indexer=indexer)))
    return replace(config, layers=tuple(layers), max_position_embeddings=num_keys)


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.gate("glm_moe_dsa-4096-16-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_keys", "num_chosen"), [(4096, 16), (16_384, 16), (16_384, 4096)])
@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm_moe_dsa_shared"])
def test_choice_of_keys_stays_below_the_plan(name: str, num_keys: int, num_chosen: int, dtype: str):
    """The last tokens of a long row, and a row beside it that sees all of its keys. Scores take most memory, or the
    keys that are chosen.
    """
    config = config_of(name, num_keys, num_chosen)
    model = load_model(latent_folder(name), config, dtype)
    run = Run(model, [[3] * num_keys, [5] * 16])
    run.sequences[0].num_computed_tokens = num_keys - NUM_TOKENS + 16
    most = peak_bytes(lambda: run.step(None, is_fused=True))
    planned, without = (
        activation_bytes(each, RankLayout(1), 0, dtype, NUM_TOKENS, NUM_TOKENS)
        for each in (config, config_of(name, num_keys, num_keys))
    )
    of_choice = choice_bytes(config, DTYPE_BYTES[dtype])
    assert of_choice > 5_000_000
    assert 0.7 < most / planned < 1
    # Negative control: most of it is the choice's.
    assert without <= planned - of_choice < most
