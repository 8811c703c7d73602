"""The models that the rows of an engine may name."""

from spmd_worker.chat.chat_format import model_chat_format
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.openai.served_models import ServedModels, check_names
from spmd_worker.resolved import ResolvedRun


def row_context(engine: Engine, base: str | None = None) -> RowContext:
    """Context of an engine's rows, with its `engine_models`. Logs a warning for tool calls of an unknown format."""
    chat_format = model_chat_format(engine.config.model, engine.tokenizer)
    limits, models = engine.config.limits, engine_models(engine, base)
    return RowContext(engine.tokenizer, engine.limits, limits, chat_format, models)


def engine_models(engine: Engine, base: str | None = None) -> ServedModels:
    """The engine's model, in answers called `base` or by its own name, and the adapters of `model.adapters` and
    `model.prompt_adapters`. Raises ConfigError for an adapter with a name of the model.
    """
    config = engine.config.model
    adapters = {name: engine.adapters.digest_of_name(name) for name in config.adapters or ()}
    prompt_adapters = {name: engine.prompt_adapters.of_name(name) for name in config.prompt_adapters or ()}
    own, *names = own_names(engine.resolved)
    return ServedModels(own if base is None else base, adapters, (own, *names), prompt_adapters)


def own_names(resolved: ResolvedRun) -> tuple[str, ...]:
    """The model's own names, that of answers first. Raises ConfigError for an adapter of the configuration with one of
    them, which is known before the model is loaded.
    """
    own, config = resolved.location.name, resolved.config.model
    names = tuple(dict.fromkeys((own, config.path or own)))
    check_names(names, config.adapters or (), config.prompt_adapters or ())
    return names
