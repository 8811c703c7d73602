"""Who is heard: everything of rank 0, warnings of the others with their rank; what a host set up is left alone."""

import logging
from pathlib import Path

import pytest
from our_logger import logger_as_it_was

from spmd_worker.base.metrics.log import LOGGER_NAME, LOGGER_NAMES, configure_logging
from spmd_worker.model_config.model_config import model_config_of

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def say_all(rank: int, world_size: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    configure_logging(rank, world_size)
    logger = logging.getLogger(f"{LOGGER_NAME}.worker.worker")
    logger.debug("a detail")
    logger.info("loaded %d tensors", 38)
    logger.warning("memory is short")
    logger.error("it is gone")
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_rank_0_logs_info_and_above_without_tag(capsys: pytest.CaptureFixture[str]):
    expected = ["INFO loaded 38 tensors", "WARNING memory is short", "ERROR it is gone"]
    assert say_all(0, 1, capsys) == expected
    assert say_all(0, 4, capsys) == expected


def test_other_ranks_log_warnings_and_above_with_tag(capsys: pytest.CaptureFixture[str]):
    assert say_all(3, 4, capsys) == ["[rank 3] WARNING memory is short", "[rank 3] ERROR it is gone"]


@pytest.mark.parametrize(("rank", "num_lines"), [(0, 1), (3, 0)])
def test_shared_facts_are_logged_by_rank_0_only(capsys: pytest.CaptureFixture[str], rank: int, num_lines: int):
    configure_logging(rank, 4)
    model_config_of({"architectures": ["LlamaForCausalLM"], **SIZES, "dtype": "float8"}, Path("config.json"))
    assert capsys.readouterr().err.count("uses float32") == num_lines
    # Negative control: a line that is not marked.
    logging.getLogger(f"{LOGGER_NAME}.model_config").warning("uses float32")
    assert capsys.readouterr().err.count("uses float32") == 1


def test_lines_have_urls_without_credentials(capsys: pytest.CaptureFixture[str]):
    configure_logging(0, 1)
    logging.getLogger(f"{LOGGER_NAME}.worker").info("job.pool=%s has ended", "s3://me:planted@b/x?sig=planted")
    assert capsys.readouterr().err == "INFO job.pool=s3://b/x?... has ended\n"


def test_logging_configured_twice_prints_lines_once(capsys: pytest.CaptureFixture[str]):
    configure_logging(0, 1)
    assert len(say_all(0, 1, capsys)) == 3


def test_logging_leaves_the_host_configuration_unchanged(capsys: pytest.CaptureFixture[str]):
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.getLogger("torch").level)
    configure_logging(1, 2)
    assert (list(root.handlers), root.level, logging.getLogger("torch").level) == before
    seen: list[str] = []

    class Host(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Host()
    root.addHandler(handler)
    try:
        logging.getLogger(f"{LOGGER_NAME}.engine").warning("ours")
        logging.getLogger("host").warning("theirs")
    finally:
        root.removeHandler(handler)
    assert seen == ["theirs"]
    assert "[rank 1] WARNING ours" in capsys.readouterr().err


def test_loggers_are_restored_for_later_tests():
    """Lines of the cache once were in no capture after a test that had configured logging."""
    loggers = [logging.getLogger(each) for each in LOGGER_NAMES]
    before = [(each.handlers, each.level, each.propagate) for each in loggers]
    with logger_as_it_was():
        configure_logging(0, 1)
        assert not any(each.propagate for each in loggers)
    assert [(each.handlers, each.level, each.propagate) for each in loggers] == before
