"""Daft on this runtime: a provider for `daft.functions.prompt` and `embed_text`, with an engine in Daft's own process.

    import daft
    from daft.functions import prompt
    from spmd_worker.integrations.daft_provider import SpmdProvider

    provider = SpmdProvider(dtype="bfloat16")   # arguments are LLM's
    data = data.with_column("answer", prompt(daft.col("question"), provider=provider, model="MODEL", max_tokens=64))

Prompts are chats, answered as a server's: Daft gives a prompt no key, so its random stream has the name of its content.
Equal prompts have equal answers, in any order and partition; a `seed` gives others.
"""

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import daft
import numpy as np
from daft.ai.protocols import Prompter, PrompterDescriptor, TextEmbedder, TextEmbedderDescriptor
from daft.ai.provider import Provider
from daft.ai.typing import EmbeddingDimensions, UDFOptions

from spmd_worker.compat.engine_args import run_config
from spmd_worker.engine.startup import read_run
from spmd_worker.frontends.openai.row_writer import RowAnswer
from spmd_worker.frontends.serve.request_reader import content_name
from spmd_worker.integrations.pipeline_rows import PipelineRows
from spmd_worker.integrations.row_engine import KeyedRow, Placed, RowEngine

_URL: Final = "/v1/chat/completions"
_UDF_KEYS: Final = ("concurrency", "num_gpus", "max_retries", "on_error", "batch_size")
