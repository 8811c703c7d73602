"""From Hydra's composition to a frozen `RunConfig`, and back to text.

Knows OmegaConf. Knows nothing about command lines or ranks; past `launch.py` nobody sees a DictConfig.
"""

import dataclasses
import json
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, read_write

from spmd_worker.config import RunConfig

SCHEMA_NAME = "run_schema"


def register_schema() -> None:
    """Offer `RunConfig` to Hydra under `SCHEMA_NAME`. Idempotent.

    OmegaConf makes nodes of frozen dataclasses read-only, which would refuse every override: the flag is cleared on the
    schema, and what comes out of `to_run_config` is frozen again.
    """
    ConfigStore.instance().store(name=SCHEMA_NAME, node=writable_schema())


def writable_schema() -> DictConfig:
    """The schema as a node that accepts values but no unknown keys."""
    schema = OmegaConf.structured(RunConfig)
    assert isinstance(schema, DictConfig), type(schema)
    for node in (schema, *(schema._get_node(key) for key in schema)):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, None)
            node._set_flag("readonly", False)
    return schema


def to_run_config(composed: DictConfig) -> RunConfig:
    """Build the frozen objects; their checks speak here. Raises ConfigError."""
    with read_write(composed):
        config = OmegaConf.to_object(composed)
    assert isinstance(config, RunConfig), type(config)
    return config


def canonical_json(config: RunConfig) -> str:
    """The resolved configuration as JSON with sorted keys: equal text means equal configuration."""
    return json.dumps(as_plain(config), sort_keys=True, separators=(",", ":"))


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Nested dictionaries of plain values."""
    return dataclasses.asdict(config)
