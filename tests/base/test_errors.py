"""Every error, and what follows from it."""

import copy
import pickle
import re
from pathlib import Path

import pytest

from spmd_worker.base import errors
from spmd_worker.base.errors import (
    AbortedError,
    ConfigError,
    MissingWeightsError,
    PromptsRefusedError,
    SpmdError,
    WorkerError,
    WorkerEventError,
)
from spmd_worker.base.files import JobFileError, JsonError
from spmd_worker.base.liveness.failure_diagnosis import describe, explained_exit_code, is_secondary
from spmd_worker.base.remote_store import RemoteChangedError, RemoteDeniedError, RemoteError
from spmd_worker.engine.request_error import RequestError
from spmd_worker.media.errors import MediaError
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.tokenizer.messages import InvalidRequestError

# name -> what callers catch, exit code, is_secondary, is_known_to_all, names_rank
EXPECTED = {
    "SpmdError": (Exception, 1, False, False, False),
    "ConfigError": (ValueError, 1, False, True, False),
    "PluginError": (ValueError, 1, False, False, False),
    "ModelConfigError": (ValueError, 1, False, True, False),
    "TokenizerError": (ValueError, 1, False, False, False),
    "ChatTemplateError": (ValueError, 1, False, False, False),
    "CheckpointError": (ValueError, 1, False, False, False),
    "AdapterError": (ValueError, 1, False, False, False),
    "PromptsRefusedError": (ValueError, 1, False, True, False),
    "DeviceError": (RuntimeError, 1, False, False, False),
    "RanksDisagreeError": (RuntimeError, 70, False, True, False),
    "ReplicaDivergedError": (RuntimeError, 70, False, True, False),
    "LostMessageError": (RuntimeError, 70, False, True, False),
    "RankFailedError": (RuntimeError, 1, True, False, True),
    "LauncherGoneError": (RuntimeError, 1, False, False, True),
    "AbortedError": (RuntimeError, 1, True, False, True),
    "PeerLostError": (RuntimeError, 1, True, False, False),
    "WorkerError": (RuntimeError, 1, False, False, True),
    "WorkerDiedError": (RuntimeError, 1, False, False, True),
    "CacheMismatchError": (RuntimeError, 1, False, False, True),
    "StepMismatchError": (RuntimeError, 1, False, False, True),
    "MissingWeightsError": (RuntimeError, 1, False, False, False),
    "WeightMismatchError": (RuntimeError, 1, False, True, True),
    "WorkerEventError": (RuntimeError, 1, False, False, True),
    "SaveError": (RuntimeError, 1, False, False, True),
    "JobError": (RuntimeError, 1, False, True, False),
    "JournalError": (ValueError, 1, False, False, False),
    "PoolError": (ValueError, 1, False, False, False),
    "StepStatsError": (ValueError, 1, False, False, False),
    "StepLogError": (ValueError, 1, False, False, False),
    "ReplayError": (ValueError, 1, False, False, False),
    "ReplayDivergedError": (ValueError, 1, False, False, False),
}
ERRORS = {name: each for name, each in vars(errors).items() if getattr(each, "__module__", None) == errors.__name__}


BUILT = [
    PromptsRefusedError("chat", 3, {1: "too long"}, has_on_error=False),
    AbortedError("rank 1 left", is_divergence=True),
    WorkerError(1, "load", "OSError", "gone", "trace", 2),
    MissingWeightsError(["a", "b"], 3, were_dropped=True),
    WorkerEventError("undone", "rank 0: no"),
    ConfigError("a=1 is wrong"),
    RequestError("prompt_too_long", "the prompt is too long"),
    InvalidRequestError("n=0", "limit_exceeded", "n"),
    MediaError("image_missing", "no image"),
    JsonError("invalid_json", "is not JSON"),
    GrammarError("grammar_refused", "no"),
    JobFileError(Path("a"), "is a link"),
    RemoteError("s3://a/b", "timed out", is_transient=True),
    RemoteChangedError("s3://a/b"),
    RemoteDeniedError(1, "denied", "s3://a/b"),
]
CLASS = re.compile(r"^class (\w+)\([^)]*(?:Error|Exception)\b[^)]*\):(?:\n(?!\S).*)*", re.MULTILINE)


@pytest.mark.parametrize("error", BUILT, ids=lambda error: type(error).__name__)
def test_error_survives_pickle_and_copy(error: Exception):
    """Regression: an error that a pool of processes cannot read breaks the pool."""
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert (str(found), vars(found)) == (str(error), vars(error))


def test_every_error_with_a_constructor_is_built():
    sources = [path.read_text() for path in Path(errors.__file__).parents[1].rglob("*.py")]
    found = {each[1] for source in sources for each in CLASS.finditer(source) if "def __init__" in each[0]}
    assert found - {type(each).__name__ for each in BUILT} == {"SpmdError"}


def test_missing_weights_read_alike_for_some_and_all():
    assert str(MissingWeightsError(["a"], 2)).startswith("1 of 2 weights were not loaded since the last commit:")
    words = "none of the 1 weights was loaded since sleep(level=2) dropped them, or a load failed"
    assert str(MissingWeightsError(["a"], 1, were_dropped=True)).startswith(words)


def test_errors_are_all_listed():
    assert list(ERRORS) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_error_classes_have_the_expected_attributes(name: str):
    error, (builtin, *expected) = ERRORS[name], EXPECTED[name]
    assert issubclass(error, SpmdError)
    assert issubclass(error, builtin)
    assert [error.exit_code, error.is_secondary, error.is_known_to_all, error.names_rank] == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_diagnosis_follows_from_error_attributes(name: str):
    _, exit_code, secondary, known_to_all, names_rank = EXPECTED[name]
    error = {
        "AbortedError": lambda: AbortedError("the text", is_divergence=False),
        "WorkerError": lambda: WorkerError(1, "step", "ValueError", "the text"),
        "PromptsRefusedError": lambda: PromptsRefusedError("generate", 2, {1: "the text"}),
        "MissingWeightsError": lambda: MissingWeightsError(["the text"], 2),
    }.get(name, lambda: ERRORS[name]("the text"))()
    assert "the text" in str(error)
    assert is_secondary(error) is secondary
    assert explained_exit_code(error) == (exit_code if known_to_all else None)
    assert describe(error, 2, 7, "execute") == (
        str(error) if names_rank else f"rank 2 raised {name} at step 7: {error}"
    )


def test_diagnosis_reads_attributes_of_errors_defined_elsewhere():
    """The diagnosis knows no class by its name."""

    class OurError(SpmdError):
        exit_code, is_known_to_all = 3, True

    assert explained_exit_code(OurError("x")) == 3
    assert not is_secondary(OurError("gloo"))


@pytest.mark.guarantee("Credentials of remote stores are never shown")
def test_messages_have_urls_without_credentials():
    """Messages with the value of a key had all of it: input that changed, a pool beside a shard."""
    text = "job.input=https://me:planted@host/rows.jsonl?X-Amz-Signature=planted changed while the job read it"
    error = errors.ConfigError(text)
    assert str(error) == "job.input=https://host/rows.jsonl?... changed while the job read it"
    for name in EXPECTED:
        kind = getattr(errors, name)
        if kind.__init__ is SpmdError.__init__:
            assert "planted" not in f"{kind(text)} {kind(text)!r}"
    refused = PromptsRefusedError("generate", 1, {0: text})
    assert "planted" not in f"{refused} {refused!r}"
