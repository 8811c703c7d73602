"""The models that the rows of an engine may name."""

from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.served_models import ServedModels


def engine_models(engine: Engine, base: str | None = None) -> ServedModels:
    """The engine's model, in answers called `base` or by its own name, and the adapters of `model.adapters` and
    `model.prompt_adapters`. Raises ConfigError for an adapter with a name of the model.
    """
    own, config = engine.resolved.location.name, engine.config.model
    adapters = {name: engine.adapters.digest_of_name(name) for name in config.adapters or ()}
    prompt_adapters = {name: engine.prompt_adapters.of_name(name) for name in config.prompt_adapters or ()}
    names = tuple(dict.fromkeys((own, config.path or own)))
    return ServedModels(own if base is None else base, adapters, names, prompt_adapters)
