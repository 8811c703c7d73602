"""Settings for every test: one thread a process, property tests that repeat, helpers of tests/ importable by name.

The files that take longest run first, so that none is left alone at the end. TESTS_ORDER, a number, has the files run
in an order that is drawn from it: no file may need another.

Imports no torch, so that the tests of torch-free code do not wait for it.
"""

import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import quick_sync
import run_folder
import stress_tier
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from our_logger import capture_ours_only, logger_as_it_was
from outside_settings import drop_settings

# Read by torch when it is imported. Ranks share the cores, and one thread is how torchrun starts them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Read by the C library. torch asks for the name of every address that it connects to, 127.0.0.1 too, and where a name
# server does not answer each connection waits 5 to 10 s. No test needs a name that /etc/hosts does not have.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# A shell's background jobs ignore Ctrl-C, and those of nohup SIGHUP, and so would all that tests start and signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

drop_settings(os.environ)
quick_sync.make_quick()
capture_ours_only()

TESTS = str(Path(__file__).resolve().parent)

LONGEST_FILES = (
    "ops/kernels/test_triton.py",
    "model/test_families.py",
    "scenarios/test_encoders.py",
    "scenarios/test_drafts_with_states.py",
    "scenarios/test_images.py",
    "model/test_expert_families.py",
    "ops/attention/test_cpu_attention.py",
    "frontends/batch/test_resume.py",
    "replica/lockstep/test_divergence.py",
    "scenarios/test_fault_matrix.py",
    "scenarios/test_encoder_inputs.py",
    "base/config/test_config.py",
    "scenarios/test_cache_pressure.py",
    "model/towers/test_towers.py",
    "frontends/batch/test_remote_jobs.py",
    "tokenizer/test_template_process.py",
    "test_launch.py",
    "scenarios/test_faults_below.py",
    "test_llm_sampling.py",
    "base/liveness/test_signals.py",
    "ranks/test_data_parallel.py",
    "ops/kernels/test_cpu_linear.py",
    "scenarios/test_embedding_manners.py",
    "scenarios/test_constrained.py",
    "scenarios/test_power_loss.py",
    "integrations/test_lm_eval.py",
    "scenarios/test_hearing.py",
    "engine/test_interrupt.py",
    "model/test_recent_families.py",
    "frontends/batch/test_data_parallel_job.py",
    "ranks/test_worlds.py",
    "scenarios/test_quantised_models.py",
    "scenarios/test_states.py",
    "frontends/tools/test_run_directories.py",
    "model/test_against_transformers.py",
    "scripts/test_docs.py",
    "scenarios/test_adapter_rows.py",
    "executor/test_multiproc_engine.py",
    "executor/test_multiproc_failures.py",
    "scenarios/test_planned_images.py",
    "model/test_joined_layers.py",
    "model/test_conv_families.py",
    "frontends/serve/test_server.py",
    "scripts/test_examples.py",
    "replica/mirror/test_mirror_follows_scheduler.py",
    "scenarios/test_stored_weights.py",
    "architecture/test_import_order.py",
    "scenarios/test_determinism.py",
    "ranks/test_tensor_parallel.py",
    "ops/attention/test_shared_blocks.py",
    "scenarios/test_forced_tokens.py",
    "model/test_mamba_families.py",
    "scenarios/test_fuzzed_calls.py",
    "model/test_greedy_against_transformers.py",
    "model/test_latent_rows.py",
    "worker/memory/test_estimate.py",
    "scenarios/test_kill_resume.py",
    "scenarios/test_model_drafts.py",
    "frontends/replay/test_replay_model.py",
    "frontends/batch/test_job_shards.py",
)
"""Of tests/, the longest first, as `--durations=0` has them."""

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
# Hypothesis also draws numbers and texts that it finds in the sources of loaded modules: a test would have other
# examples alone than beside others, and each process would read all the sources.
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run share a folder for what takes long to make, and inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[run_folder.VARIABLE] = tempfile.mkdtemp(prefix="tests-run-")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Importing every test makes many objects and no garbage: a fifth of the time was spent looking for some, and each
    full collection of a test would look through all of them.
    """
    from spmd_worker.worker.memory import garbage

    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    # What engines leave in cycles is little: looking for it as often as Python does took 3 % of the time.
    gc.set_threshold(10_000)
    # From here on there always are some, and each job in this process would count them.
    garbage.has_frozen_objects = lambda: True


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(run_folder.VARIABLE), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file's tests stay together: they share what takes long to make. Cases get their tier before one is chosen."""
    is_complete = not config.getoption("lf", default=False) and not any("::" in argument for argument in config.args)
    stress_tier.share(items, is_complete=is_complete)
    stress_tier.limit(items)
    paths = list(dict.fromkeys(item.path for item in items))
    order = os.environ.get("TESTS_ORDER")
    if order:
        random.Random(int(order)).shuffle(paths)
    elif stress_tier.is_stress_run(config):
        paths.sort(key=lambda path: stress_tier.place_of(path, Path(TESTS)))
    else:
        longest = [Path(TESTS) / name for name in LONGEST_FILES]
        paths.sort(key=lambda path: longest.index(path) if path in longest else len(longest))
    places = {path: number for number, path in enumerate(paths)}
    items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if stress_tier.is_stress_run(config):
        stress_tier.say(terminalreporter)


@pytest.fixture(autouse=True)
def _our_logger_as_it_was() -> Iterator[None]:
    """A program configures it for its process, with the stream that is stderr at that moment: another test's is not."""
    with logger_as_it_was():
        yield


@pytest.fixture(scope="session", autouse=True)
def _onednn_without_amx() -> None:
    """oneDNN keeps off AMX, as in a worker, whose products come first: a test's reference may be its first use."""
    if "torch" in sys.modules:
        from spmd_worker.ops.kernels.cpu.linear import keep_onednn_from_amx

        keep_onednn_from_amx()


@pytest.fixture(scope="session", autouse=True)
def _helpers_are_forked() -> None:
    """Processes that render templates and prepare images are forked: tests/support/forked_helpers.py."""
    from forked_helpers import fork_helpers

    fork_helpers()


@pytest.fixture
def control() -> Callable[..., AbstractContextManager[object]]:
    """`with control("WORDS"):` in a negative control: the check in it must fail, and its failure must contain WORDS.

    A check that passes there is no check: it would not notice that its guarantee is broken.
    """
    return lambda words="": pytest.raises(AssertionError, match=re.escape(words) if words else None)


@pytest.fixture(scope="module")
def model() -> Path:
    """A small Llama, for files without another model."""
    # Here, because it brings transformers, which takes ranks seconds.
    from reference_models import checkpoint_folder

    return checkpoint_folder("llama3")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A byte-level tokenizer, for files without another one."""
    from tokenizer_folders import write_byte_level

    from spmd_worker.tokenizer.tokenizer import Tokenizer

    return Tokenizer.open(write_byte_level(tmp_path_factory.mktemp("tokens")))


@pytest.fixture
def checks_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of the scheduler and the cache after every step of this test's engines."""
    from spmd_worker.resolved import CHECK_VARIABLE

    monkeypatch.setenv(CHECK_VARIABLE, "1")


@pytest.fixture
def own_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of the hub's files for this test."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def files_composed_once() -> Iterator[None]:
    """Hydra reads `conf/` once for this file: tests/support/composed_once.py."""
    from composed_once import composed_in_copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spmd_worker.base.config.compose._composed", composed_in_copy)
        yield


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """In this test, worker processes of the multiprocess executor are forked: tests/support/forked_workers.py."""
    from forked_workers import forked

    with forked():
        yield


@pytest.fixture(scope="module")
def forked_workers_of_module() -> Iterator[None]:
    """In this file."""
    from forked_workers import forked

    with forked():
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[object]:
    """moto's S3 over HTTP, with faults: tests/support/s3_server.py."""
    from s3_server import S3Server

    server = S3Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[object]:
    """The server, in use, without faults, with an empty bucket `s3.bucket`; retries do not wait."""
    from s3_server import use_server

    yield from use_server(s3_server, monkeypatch, request.node.name)
