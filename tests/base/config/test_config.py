"""Every file of conf/ composes; every bad value and every typo is one sentence with a way out."""

import dataclasses
import errno
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra import compose
from ranks import REPOSITORY

from spmd_worker.base.config import compose as compose_module
from spmd_worker.base.config.compose import as_yaml, compose_run, named_sets
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import (
    CacheConfig,
    ExecutorConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
)
from spmd_worker.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("files_composed_once")

CONF = REPOSITORY / "conf"
CHOICES = [f"{group}={name}" for group, names in named_sets([CONF]).items() for name in names]

# DESIGN.md, section 7: what people type. A key that is renamed breaks every script that they have.
KEYS = {
    "model": ("path", "dtype", "max_model_len", "load_format"),
    "parallel": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "executor": ("backend", "digest_every", "timeout_s"),
    "cache": ("block_size", "num_blocks", "gpu_memory_utilization", "swap_space_gib", "enable_prefix_caching"),
    "scheduler": (
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "preemption_mode"),
        "policy",
    ),
    "sampling": (
        *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "ignore_eos", "logprobs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ),
    "job": ("input", "output", "run_dir", "resume", "max_rows", "max_error_rows"),
}


def composed(*overrides: str, extra_dir: Path | None = None, paths: dict[str, str] | None = None) -> RunConfig:
    return compose_run(CONF, overrides, extra_dir, paths)


def error_result(*overrides: str, extra_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        composed(*overrides, extra_dir=extra_dir)
    return str(refused.value)


@pytest.mark.parametrize("name", ["Ann's sets", "a\\'b", "ends in \\", "[x]={y}, ü"])
def test_config_folder_accepts_any_name(tmp_path: Path, name: str):
    folder = tmp_path / name / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\nseed: 41\n")
    assert composed("experiment=mine", extra_dir=folder.parent).seed == 41


def test_composed_defaults_equal_the_dataclass_defaults():
    assert composed() == RunConfig()


def test_conf_holds_no_default_values():
    assert list(yaml.safe_load((CONF / "config.yaml").read_text())) == ["defaults"]


@pytest.mark.parametrize("choice", CHOICES)
def test_conf_files_all_compose(choice: str):
    config = composed(choice)
    group, _, name = choice.partition("=")
    for key, value in (yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) or {}).items():
        if group != "experiment":
            assert getattr(getattr(config, group), key) == value


def test_conf_choices_list_every_yaml_file():
    files = [path.relative_to(CONF).with_suffix("") for path in CONF.rglob("*.yaml") if path.name != "config.yaml"]
    assert sorted(f"{path.parent}={path.name}" for path in files) == sorted(CHOICES)
    assert len(CHOICES) >= 10


def test_config_keys_of_users_exist():
    for group, names in KEYS.items():
        assert set(names) <= {spec.name for spec in dataclasses.fields(getattr(RunConfig(), group))}, group


def test_command_line_overrides_named_set_and_default():
    """Precedence: the command line, then a named set, then the default."""
    assert composed("cache=tiny").cache.num_blocks == 64
    assert composed("cache=tiny", "cache.num_blocks=99").cache == CacheConfig(num_blocks=99)
    assert composed("experiment=demo", "parallel.tensor_parallel_size=1").parallel.tensor_parallel_size == 1


def test_key_ignores_a_plus_prefix():
    assert composed("+cache.num_blocks=3", "++seed=2", "+experiment=demo") == composed(
        "cache.num_blocks=3", "seed=2", "experiment=demo"
    )


def test_user_config_folder_adds_named_sets(tmp_path: Path):
    folder = tmp_path / "with = and (brackets)"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\ncache:\n  num_blocks: 5\n")
    config = composed("experiment=mine", "cache=tiny", extra_dir=folder)
    assert (config.seed, config.cache.num_blocks, config.cache.block_size) == (7, 5, 16)
    assert "mine" in named_sets([CONF, folder])["experiment"]


def test_composed_config_is_frozen_and_plain():
    config = composed("sampling.stop=[a,'b c']")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.num_blocks = 3  # type: ignore[misc]  # frozen, which is the point
    assert config.sampling.stop == ["a", "b c"]
    assert type(config.sampling.stop) is list
    assert config.sampling.given() == {"stop": ["a", "b c"]}


def test_mapping_has_names_of_its_own():
    adapters = composed("model.adapters={sql-v2.1: /a/sql, b_c: '/x=y'}").model.adapters
    assert adapters == {"sql-v2.1": "/a/sql", "b_c": "/x=y"}
    for nothing in ((), ("model.adapters=null",), ("model.adapters={}",)):
        assert composed(*nothing).model.adapters is None
    assert composed("model.prompt_adapters={sql: /a}").model.prompt_adapters == {"sql": "/a"}


def test_quoted_values_escape_hydra_syntax():
    assert composed("job.input='a=b (1).jsonl'").job.input == "a=b (1).jsonl"
    assert composed("model.path='/ü/x'").model.path == "/ü/x"
    assert composed("job.input=-").job.input == "-"


def test_options_by_name_compose_as_texts():
    """OmegaConf merges no mapping into a null of the schema."""
    given = ("cache.connector=a:b", "cache.connector_options={folder:'/x y/\u00e9',gib:20,half:0.5,is_new:true}")
    options = {"folder": "/x y/\u00e9", "gib": "20", "half": "0.5"}
    found = composed(*given).cache.connector_options
    assert {name: found[name] for name in options} == options
    assert found["is_new"].lower() == "true"
    assert composed().cache.connector_options is None
    assert composed(*given, "cache.connector_options=null").cache.connector_options is None
    made = CacheConfig(connector="a:b", connector_options={"folder": Path("/x"), "gib": np.int64(20), "half": 0.5})
    assert made.connector_options == {"folder": "/x", "gib": "20", "half": "0.5"}
    with pytest.raises(ConfigError, match=r"cache\.connector_options=3 must be texts by name"):
        composed("cache.connector=a:b", "cache.connector_options=3")


def test_config_yaml_can_be_read_again():
    config = composed("experiment=demo")
    assert yaml.safe_load(as_yaml(config)) == dataclasses.asdict(config)


MISSPELLED = [
    (
        "cache.num_block=3",
        "cache.num_block=3: there is no key cache.num_block; did you mean cache.num_blocks? --help=all lists all",
    ),
    (
        "parallel.tensor_paralel_size=2",
        "parallel.tensor_paralel_size=2: there is no key parallel.tensor_paralel_size; did you mean "
        "parallel.tensor_parallel_size? --help=all lists all",
    ),
    (
        "cach.x=1",
        "cach.x=1: there is no key cach.x; cache has dtype, block_size, num_blocks, gpu_memory_utilization, "
        "swap_space_gib, enable_prefix_caching",
    ),
    (
        "temperature=0.5",
        "temperature=0.5: there is no key temperature; did you mean sampling.temperature? --help=all lists all",
    ),
    (
        "parallel.tp=2",
        "parallel.tp=2: there is no key parallel.tp; did you mean parallel? parallel has tensor_parallel",
    ),
    ("plann=true", "plann=true: there is no key plann; did you mean plan? --help=all lists all"),
    ("modle=demo", "modle=demo: there is no key modle; did you mean model? --help=all lists all"),
    ("+foo=3", "foo=3: there is no key foo; --help=all lists all"),
    ("model._target_=os.system", "model._target_=os.system: there is no key model._target_; model has path,"),
]


@pytest.mark.guarantee("A misspelled key is named")
@pytest.mark.parametrize(("override", "message"), MISSPELLED)
def test_misspelled_key_error_suggests_near_keys(override: str, message: str):
    assert error_result(override).startswith(message)


@pytest.mark.control("A misspelled key is named")
@pytest.mark.parametrize(("override", "message"), MISSPELLED)
def test_misspelled_key_check_detects_unnamed_or_ignored_key(
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    message: str,
    control,
):
    """Negative control: no key is near; a sentence without the key; keys that nobody knows are left out."""
    check = test_misspelled_key_error_suggests_near_keys
    if "did you mean" in message:
        monkeypatch.setattr(compose_module, "_nearest_keys", lambda key: [])
        with control():
            check(override, message)
    monkeypatch.setattr(compose_module, "_unknown_key", lambda *_: ConfigError("there is no such key"))
    with control():
        check(override, message)
    monkeypatch.setattr(compose_module, "_check_known", lambda *_: None)
    monkeypatch.setattr(compose_module, "compose", lambda name, overrides: compose(name, []))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check(override, message)


REFUSED = [
    ("cache.num_blocks=abc", "cache.num_blocks=abc must be a whole number or null"),
    ("cache.num_blocks=0", "cache.num_blocks=0 must be 1 or more"),
    ("cache.block_size=12", "cache.block_size=12 must be a power of two, such as 16"),
    (
        "cache.gpu_memory_utilization=1.5",
        "cache.gpu_memory_utilization=1.5 must be above 0 and at most 1, such as 0.9",
    ),
    (
        "cache.gpu_memory_utilization=nan",
        "cache.gpu_memory_utilization=nan must be above 0 and at most 1, such as 0.9",
    ),
    ("seed=null", "seed=null must be a whole number"),
    ("seed=true", "seed=true must be a whole number"),
    ("seed=${foo}", "seed=${foo} must be a whole number (Interpolation key 'foo' not found)"),
    ("sampling.temperature=hot", "sampling.temperature=hot must be a number or null"),
    ("sampling.stop=x", "sampling.stop=x must be a list of texts, such as [a,b] or null"),
    (
        "parallel.pipeline_layers=x",
        "parallel.pipeline_layers=x must be a list of whole numbers, such as [10,8] or null",
    ),
    # They were an AttributeError: OmegaConf names the entry of the list.
    (
        "parallel.pipeline_layers=[1,x]",
        "parallel.pipeline_layers=[1,x] must be a list of whole numbers, such as [10,8] or null",
    ),
    ("model.quantization=fp4", "model.quantization=fp4 is not one of int8, fp8, nor null"),
    ("model.quantization=bitsandbytes", "model.quantization=bitsandbytes: the model's config.json says how"),
    ("model.load_format=bitsandbytes", "model.load_format=bitsandbytes: files that it quantised are read without it"),
    ("model.pooling_type=sum", "model.pooling_type=sum is not one of last, mean, cls, nor null"),
    ("model.adapters=3", "model.adapters=3 must be texts by name, such as {a: b} or null"),
    ("model.adapters={a: [1]}", "model.adapters={'a': [1]} must be texts by name, such as {a: b} or null"),
    ("model.adapters={a: ''}", "model.adapters={'a': ''} must map names to folders, and neither may be empty"),
    ("model.prompt_adapters={a: ''}", "model.prompt_adapters={'a': ''} must map names to folders, and neither may be"),
    ("model.adapters={7: x}", "model.adapters={7: x} must be texts by name, such as {a: b} or null"),
    ("plan=maybe", "plan=maybe must be true or false"),
    ("plan.memory_gib=64", "plan.memory_gib=64 is the memory that a plan is made for, and a run measures its own: add"),
    ("plan.memory_gib=0", "plan.memory_gib=0 must be above 0 and at most 1048576, such as 64"),
    ("plan.memory_gib=nan", "plan.memory_gib=nan must be above 0 and at most 1048576, such as 64"),
    ("plan.memory_gib=much", "plan.memory_gib=much must be a number or null"),
    ("executor.worker_cls=[1]", "executor.worker_cls=[1] must be text or null"),
    ("model.dtype=float8", "model.dtype=float8 is not one of auto, float32, bfloat16, float16"),
    ("model.max_model_len=0", "model.max_model_len=0 must be 1 or more"),
    ("model.image_background=white", "model.image_background=white must be a colour, such as '#ffffff'"),
    ("limits.image_formats=[PNG,SVG]", "limits.image_formats=[PNG,SVG] must be one or more of PNG, JPEG, WEBP, GIF"),
    ("limits.image_formats=[]", "limits.image_formats=[] must be one or more of PNG"),
    ("model.image_processor={size: x}", "model.image_processor has size=x, which is not JSON"),
    ("model.image_processor={fps: 2}", "model.image_processor has the unsupported key 'fps': give size, max_patches"),
    ("device=tpu", "device=tpu is not one of auto, cpu, cuda"),
    ("parallel.tensor_parallel_size=0", "parallel.tensor_parallel_size=0 must be 1 or more"),
    ("executor.timeout_s=nan", "executor.timeout_s=nan must be from 1 to 604800"),
    ("executor.timeout_s=inf", "executor.timeout_s=inf must be from 1 to 604800"),
    (
        "executor.backend=ray",
        "executor.backend=ray is not one of auto, external_launcher, uniproc, multiproc, nor the qualified name of a "
        "class",
    ),
    ("job.resume=maybe", "job.resume=maybe is not one of auto, never, force"),
    ("job.max_rows=1.5", "job.max_rows=1.5 must be a whole number or null"),
    ("job.max_error_rows=-1", "job.max_error_rows=-1 must be 0 or more"),
    ("job.commit_s=inf", "job.commit_s=inf must be 0 or more, and finite"),
    ("job.commit_s=nan", "job.commit_s=nan must be 0 or more"),
    ("serve.drain_s=inf", "serve.drain_s=inf must be from 0 to 604800"),
    ("serve.drain_s=nan", "serve.drain_s=nan must be from 0 to 604800"),
    ("serve.drain_s=604801", "serve.drain_s=604801 must be from 0 to 604800"),
    ("serve.reader_timeout_s=0", "serve.reader_timeout_s=0 must be above 0 and at most 604800 seconds"),
    ("serve.reader_timeout_s=inf", "serve.reader_timeout_s=inf must be above 0 and at most 604800 seconds"),
    # More milliseconds than the socket's option can hold.
    ("serve.reader_timeout_s=2200000", "serve.reader_timeout_s=2.2e+06 must be above 0 and at most 604800 seconds"),
    (
        "scheduler.max_num_seqs=4096",
        "scheduler.max_num_batched_tokens=2048 is below scheduler.max_num_seqs=4096: each running sequence needs a "
        "token a step; raise the first or lower the second",
    ),
    ("cache=nosuch", "cache=nosuch is not one of files, tiny"),
    ("experiment=nosuch", "experiment=nosuch is not one of demo"),
    ("model=null", "model=null is not the name of a set of values: choose a named set, as in model=NAME"),
    (
        "cache={num_blocks:3}",
        "cache={num_blocks:3} is not the name of a set of values: choose a named set, as in cache=NAME",
    ),
    ("~cache", "~cache: keys cannot be removed; leave it out, or give the key another value"),
    ("foo", "foo is not an override: write KEY=VALUE, such as cache.num_blocks=512"),
    ("seed=1,2", "seed=1,2 has several values and a command runs one job: give one value"),
    ("seed=range(1,3)", "seed=range(1,3) has several values and a command runs one job: give one value"),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: Hydra's own settings cannot be changed here"),
    ("hydra.run.dir=x", "hydra.run.dir=x: Hydra's own settings cannot be changed here"),
    ("hydra/launcher=x", "hydra/launcher=x: Hydra's own settings cannot be changed here"),
]


LIKE_OTHERS = (
    *("cache.gpu_memory_utilization=nan", "seed=true", "parallel.pipeline_layers=x", "model.pooling_type=sum"),
    *("model.adapters={a: [1]}", "model.prompt_adapters={a: ''}", "plan.memory_gib=nan", "plan.memory_gib=much"),
    *("limits.image_formats=[]", "device=tpu", "executor.timeout_s=inf", "job.resume=maybe", "job.commit_s=nan"),
    *("serve.drain_s=inf", "serve.drain_s=604801", "serve.reader_timeout_s=inf", "experiment=nosuch"),
    *("seed=range(1,3)", "hydra.run.dir=x"),
)
"""Rules that another value of the same key, or the same rule of another key, has in the gate."""


@pytest.mark.parametrize(
    ("override", "message"),
    [pytest.param(*each, marks=[pytest.mark.stress] * (each[0] in LIKE_OTHERS), id=each[0]) for each in REFUSED],
)
def test_config_error_is_one_sentence_with_its_rule(override: str, message: str):
    said = error_result(override)
    assert said.startswith(message)
    assert "\n" not in said


def test_config_error_quotes_an_unreadable_value():
    said = error_result("executor.worker_cls=a=b (1)")
    assert said.startswith("executor.worker_cls=a=b (1) cannot be read:")
    assert said.endswith("as in \"executor.worker_cls='a=b (1)'\"")


@pytest.mark.parametrize("value", ['say "=" once', '["=', 'it\'s = "$HOME"', "`=` \\", '=\\"', "=\\\\ \\'"])
def test_quotes_of_an_error_can_be_typed(value: str):
    """A double quote in the value ended the shell's, a dollar was expanded, and a quote at the value's end was lost."""
    _, _, words = error_result(f"executor.worker_cls={value}").rpartition(", as in ")
    typed = subprocess.run(["sh", "-c", f"printf %s {words}"], capture_output=True, text=True, check=True).stdout
    assert composed(typed).executor.worker_cls == value


ODD = [*"=()[]{},#&;!?|<>*$'\"\\ \t", "é", "日本", "a=b (1) [2] {3}.jsonl", "trailing\\"]
ODD += ["-x", "+x", "@x", "007", "true", "1e3"]


@pytest.mark.finding(number="D10")
def test_demo_set_resolves_paths_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = composed("experiment=demo")
    assert config.model.path == str(CONF.parent / "scripts/demo/model")
    assert Path(config.job.input or "").read_bytes().count(b"\n") == 480
    assert (config.job.output, config.job.run_dir) == ("runs/demo/output.jsonl", "runs/demo")
    monkeypatch.chdir(CONF.parent)
    assert composed("experiment=demo").model.path == "scripts/demo/model"


@pytest.mark.finding(number="D10")
def test_demo_error_names_files_missing_from_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.path=scripts/demo/model .*repository.*: give model\.path=PATH"):
        compose_run(tmp_path / "conf", ["experiment=demo"])
    with pytest.raises(
        ConfigError, match=r"^job\.input=scripts/demo/prompts\.jsonl .*repository.*: give job\.input=PATH"
    ):
        compose_run(tmp_path / "conf", ["experiment=demo", "model.path=m"])
    config = compose_run(tmp_path / "conf", ["experiment=demo", "model.path=m"], paths={"job.input": "x"})
    assert (config.model.path, config.job.input) == ("m", "x")
    assert compose_run(tmp_path / "conf", []).model.path is None


PATHS = ("model.path", "job.input", "job.output", "job.run_dir", "job.prometheus_file")


def path_values(config: RunConfig) -> list[str | None]:
    return [getattr(getattr(config, group), name) for group, _, name in (key.partition(".") for key in PATHS)]


@pytest.mark.matrix
@pytest.mark.parametrize("turn", [0, pytest.param(2, marks=pytest.mark.stress)])
def test_config_paths_equal_the_shell_arguments(turn: int):
    """All keys at once: composing takes long. Each odd value is that of a key, in the stress tier of another too."""

    def of_all(*values: str, **options: str) -> list[str | None]:
        paths = {key: options["option"] for key in PATHS if options}
        return path_values(composed(*(f"{key}={value}" for value in values for key in PATHS), paths=paths or None))

    for first in range(0, len(ODD), len(PATHS)):
        values = [ODD[(first + number + turn) % len(ODD)] for number in range(len(PATHS))]
        assert path_values(composed(*map("=".join, zip(PATHS, values, strict=True)))) == values
        assert path_values(composed(paths=dict(zip(PATHS, values, strict=True)))) == values
    # What was quoted for Hydra stays what it was, and null is none.
    assert of_all("'a=b'") == ["a=b"] * len(PATHS)
    assert of_all("x", "null") == [None] * len(PATHS)
    # The later of two counts, and an option more than both.
    assert of_all("'a'", "b=c") == ["b=c"] * len(PATHS)
    assert of_all("b=c", "'a'") == ["a"] * len(PATHS)
    assert of_all("b=c", "'a'", option="d") == ["d"] * len(PATHS)


@pytest.mark.gate("job.input", "model.path")
@pytest.mark.parametrize("key", PATHS)
def test_odd_path_leaves_other_keys_unchanged(key: str):
    number = PATHS.index(key)
    plain = path_values(composed())
    for found in (composed(f"{key}=a=b (1)"), composed(paths={key: "a=b (1)"})):
        assert path_values(found) == [*plain[:number], "a=b (1)", *plain[number + 1 :]]


def test_tilde_expands_only_at_the_path_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    job = composed("job.input=~/rows.jsonl", "job.output=out~/~", paths={"job.run_dir": "~/run"}).job
    assert (job.input, job.output, job.run_dir) == ("/home/somebody/rows.jsonl", "out~/~", "/home/somebody/run")
    assert composed("job.input='~/rows.jsonl'").job.input == "/home/somebody/rows.jsonl"
    assert composed("job.input=-").job.input == "-"


FILES = [
    (
        "cache:\n  num_block: 3\n",
        "experiment/bad.yaml: cache.num_block: there is no key cache.num_block; did you mean cache.num_blocks? ",
    ),
    ("sampling:\n  temperature: hot\n", "experiment/bad.yaml: sampling.temperature must be a number or null (Value "),
    ("defaults:\n  - override /model: gone\n", "model=gone is not one of demo"),
    ("cache: null\n", "experiment/bad.yaml: cache must be keys and values (field 'cache' is not Optional)"),
    ("seed: [\n", "while parsing a flow node expected the node content, but found '<stream end>' in "),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=["key", "value", "set", "group", "yaml"])
def test_config_error_names_the_bad_file(tmp_path: Path, text: str, message: str):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(f"# @package _global_\n{text}")
    said = error_result("experiment=bad", extra_dir=tmp_path)
    assert said.startswith(message)
    assert "\n" not in said
    assert "bad.yaml" in said or "gone" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"path: \xff\n", "a named set of {folder} cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b"- 1\n", "model/bad.yaml must be keys and values, as in KEY: VALUE (Merge error: list is not"),
    ],
)
def test_config_file_of_another_kind_is_an_error(tmp_path: Path, content: bytes, message: str):
    """The first was a traceback, the second a sentence of OmegaConf with its records."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bad.yaml").write_bytes(content)
    assert error_result("model=bad", extra_dir=tmp_path).startswith(message.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("3", "defaults of a named set cannot be used (Invalid defaults list in 'experiment/bad', defaults must be"),
        ("[{a: 1, b: 2}]", "defaults of a named set cannot be used (In experiment/bad: Too many keys in default item"),
        ("[{override /model: 3}]", "defaults of a named set cannot be used (Unsupported item value in defaults : int"),
        ("[{/experiment: bad}]", "defaults of a named set cannot be used (a set includes itself, or has values nested"),
        # Its cause was lost.
        ("[{override /model: demo}, {override /modelx: demo}]", "In 'experiment/bad': Could not override 'model"),
    ],
)
def test_wrong_defaults_of_a_set_are_named(tmp_path: Path, defaults: str, message: str):
    """They were ValueErrors without a remedy, and a RecursionError."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(f"# @package _global_\ndefaults: {defaults}\n")
    assert error_result("experiment=bad", extra_dir=tmp_path).startswith(message)


def test_set_that_cannot_be_opened_needs_no_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*given: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "mine.yaml")

    monkeypatch.setattr("spmd_worker.base.config.compose.compose", refuse)
    assert error_result("seed=1", extra_dir=tmp_path) == (
        f"a named set of {tmp_path} cannot be read: [Errno 13] Permission denied: 'mine.yaml': change that, or give "
        f"another"
    )


def test_limits_reject_bad_values_and_larger_defaults():
    assert error_result("limits.max_n=0") == "limits.max_n=0 must be from 1 to 1024"
    assert error_result("limits.max_stop_strings=-1") == "limits.max_stop_strings=-1 must be 0 or more"
    assert error_result("limits.max_nesting=1000") == "limits.max_nesting=1000 must be from 1 to 256"
    assert error_result("limits.max_tokens=10", "sampling.max_tokens=11") == (
        "sampling.max_tokens asks for 11, more than limits.max_tokens=10: lower the one or raise the other"
    )
    assert error_result("model.image_min_pixels=9", "model.image_max_pixels=8") == (
        "model.image_min_pixels=9 is above model.image_max_pixels=8: lower it"
    )
    assert error_result("limits.max_n=2", "sampling.n=3").startswith("sampling.n asks for 3, more than limits.max_n=2")
    assert error_result("limits.max_stop_strings=0", "sampling.stop=[a]").startswith(
        "sampling.stop asks for 1, more than"
    )
    # Regression: every row became an error row.
    assert error_result("sampling.logprobs=-1") == (
        "sampling.logprobs=-1 requests the entire vocabulary, which no row or request gets: it must be from 0 to 64; "
        "in Python SamplingParams(logprobs=-1) gives the entire vocabulary"
    )
    assert error_result("sampling.logprobs=65").startswith("sampling.logprobs=65 must be from 0 to 64")


def test_host_tier_requires_prefix_caching_and_digests():
    assert error_result("cache.host_tier_gib=2", "cache.enable_prefix_caching=false") == (
        "cache.host_tier_gib=2 keeps prefix blocks, and cache.enable_prefix_caching=false makes none: enable it, or "
        "leave cache.host_tier_gib at 0"
    )
    assert error_result("cache.host_tier_gib=2", "executor.digest_every=0") == (
        "cache.host_tier_gib=2 cannot run with executor.digest_every=0: ranks report finished "
        "transfers with their digests; set executor.digest_every to 1 or more"
    )
    assert error_result("cache.swap_space_gib=-1") == "cache.swap_space_gib=-1.0 must be 0 or more"


def test_config_dataclasses_check_values_like_command_line():
    with pytest.raises(ConfigError, match=r"^executor\.digest_every=-1 .*\b0 or more"):
        ExecutorConfig(digest_every=-1)
    with pytest.raises(ConfigError, match=r"^scheduler\.max_num_batched_tokens=4 .*below scheduler\.max_num_seqs=8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)
    assert ExecutorConfig(backend="my_package.executors.Mine").backend == "my_package.executors.Mine"


WRONG_TYPES = [
    (RunConfig, {"seed": "x"}, "seed='x' must be a whole number"),
    (RunConfig, {"seed": True}, "seed=True must be a whole number"),
    (RunConfig, {"seed": None}, "seed=None must be a whole number"),
    (RunConfig, {"seed": 1.0}, "seed=1.0 must be a whole number"),
    (RunConfig, {"device": 0}, "device=0 must be text"),
    (RunConfig, {"cache": {"num_blocks": 3}}, "cache={'num_blocks': 3} must be a CacheConfig"),
    (ModelOptions, {"path": 5}, "model.path=5 must be text or null"),
    (ModelOptions, {"dtype": None}, "model.dtype=None must be text"),
    (ParallelConfig, {"tensor_parallel_size": "2"}, "parallel.tensor_parallel_size='2' must be a whole number"),
    (
        ParallelConfig,
        {"pipeline_layers": [4, True]},
        "parallel.pipeline_layers=[4, True] must be a list of whole numbers, such as [10,8] or null",
    ),
    (ExecutorConfig, {"timeout_s": "30"}, "executor.timeout_s='30' must be a number"),
    (ExecutorConfig, {"timeout_s": 10**400}, f"executor.timeout_s={10**400} must be a number"),
    (CacheConfig, {"num_blocks": "8"}, "cache.num_blocks='8' must be a whole number or null"),
    (CacheConfig, {"enable_prefix_caching": 1}, "cache.enable_prefix_caching=1 must be true or false"),
    (SchedulerConfig, {"max_num_seqs": "8"}, "scheduler.max_num_seqs='8' must be a whole number or null"),
    (SamplingConfig, {"temperature": False}, "sampling.temperature=False must be a number or null"),
    (SamplingConfig, {"stop": "x"}, "sampling.stop='x' must be a list of texts, such as [a,b] or null"),
]


@pytest.mark.parametrize(("record", "values", "message"), WRONG_TYPES, ids=[each[2][:40] for each in WRONG_TYPES])
def test_config_dataclass_rejects_values_of_another_type(record: type, values: dict[str, object], message: str):
    """`seed="x"` once passed, and `max_num_seqs="8"` was a TypeError from inside."""
    with pytest.raises(ConfigError) as refused:
        record(**values)
    assert str(refused.value) == message


def test_config_annotations_check_every_key():
    """Negative control of the table: no key is left out, whatever is added."""
    for record in (
        RunConfig,
        *(type(value) for value in vars(RunConfig()).values() if dataclasses.is_dataclass(value)),
    ):
        for spec in dataclasses.fields(record):
            with pytest.raises(ConfigError, match=rf"\b{spec.name}=<object .*> must be "):
                record(**{spec.name: object()})


def test_config_numbers_become_python_int_and_float():
    """numpy's and torch's integers are whole numbers, a whole number is a number; ranks compare them as JSON."""
    cache = CacheConfig(num_blocks=np.int64(8), gpu_memory_utilization=np.float32(0.5), swap_space_gib=2)
    values = (cache.num_blocks, cache.gpu_memory_utilization, cache.swap_space_gib)
    assert values == (8, 0.5, 2.0)
    assert [type(value) for value in values] == [int, float, float]
    assert ParallelConfig(pipeline_layers=(np.int32(4), 6)).pipeline_layers == [4, 6]
    assert as_yaml(RunConfig(cache=cache)) == as_yaml(
        composed("cache.num_blocks=8", "cache.gpu_memory_utilization=0.5", "cache.swap_space_gib=2")
    )
