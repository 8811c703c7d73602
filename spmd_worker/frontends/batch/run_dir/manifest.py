"""Identity of a job: everything that its answers depend on, written to the run directory before the first row.

A resumed job must have the same; the number of ranks, their memory and the steps may differ, as long as row-parallel
sums are added in the same order.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from hashlib import blake2b
from operator import getitem
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.adapter_limits import MERGED
from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import JsonError, read_json_object, write_json
from spmd_worker.base.numerical_policy import NumericalPolicy
from spmd_worker.base.remote_names import FilePath, RemotePath, absolute_name, file_path, shown_name
from spmd_worker.base.urls import all_without_credentials
from spmd_worker.base.version import code_fingerprint, version
from spmd_worker.frontends.batch.output_parts import is_parts, last_path, size_of
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME
from spmd_worker.frontends.batch.run_dir.shard import Shard, output_of
from spmd_worker.model.weights.sampled_digest import sampled_digests
from spmd_worker.model_config.gguf.header import SUFFIX
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory.media_memory import longest_media

FORMAT_VERSION: Final = 2
_UNCHECKED_VERSION: Final = 1
"""Version without a checksum."""
_HASH_BYTES: Final = 16
_INPUT_KEY: Final = "job.input"
_ARITHMETIC_KEY: Final = "arithmetic"
_POLICY_KEY: Final = "numerical policy"
_MODEL_KEY: Final = "model.path"
_ROW_SUMS_KEY: Final = "row-parallel sums"
_LOAD_FORMAT_KEY: Final = "model.load_format"
_TOKENIZER_KEY: Final = "tokenizer"
_CODE_KEY: Final = "version of the code"
_MADE_KEYS: Final = (_MODEL_KEY, _TOKENIZER_KEY)
"""Keys of files that a version makes of a GGUF: of another version they say nothing of the model."""
_WEIGHTS_PREFIX: Final = "weights of "
"""Begins the keys of weight files."""
_CHECKSUM_KEY: Final = "checksum"
NOT_READ: Final = "not read yet"
"""Placeholder for values known later: the digest of an input, the arithmetic of kernels."""

_ANSWER_KEYS: Final = (
    *("model.dtype", "model.max_model_len", "model.load_format", "model.quantization"),
    *("model.logprobs_mode", "model.head_dtype", "seed"),
    *("model.tool_call_format", "model.reasoning_format"),
    *("model.runner", "model.pooling_type", "model.classifier_from_token", "model.allow_any_dimensions"),
    *("model.default_prompt_name", "scheduler.policy", "cache.dtype"),
)
"""Keys of the configuration that answers depend on, besides all of `sampling`, the input and the model's files."""


def make_manifest(
    resolved: ResolvedRun,
    packages: Mapping[str, str],
    tokenizer: str | None,
    inputs: Sequence[FilePath] | None,
    adapters: Mapping[str, str],
    media: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A manifest: a resumed run must have equal `answers`; the rest describes the run. Raises OSError.

    `tokenizer` is the tokenizer's fingerprint, `inputs` the files to read (None: a stream). Their digest and number of
    rows are added later (`set_input`), and so is the arithmetic of the ranks (`set_arithmetic`). `adapters` are digests
    of the adapters' contents, by key, `media` what answers to images and audio depend on.
    """
    config = resolved.config
    settings = asdict(config)
    # Names may hold a password or a signature; answers depend on none of these.
    settings |= {group: all_without_credentials(settings[group]) for group in ("job", "cache", "speculative_config")}
    settings["model"]["path"] = shown_name(config.model.path or "") or None
    answers: dict[str, Any] = {key: reduce(getitem, key.split("."), settings) for key in _ANSWER_KEYS}
    answers |= {f"{group}.{key}": value for group in ("sampling", "limits") for key, value in settings[group].items()}
    answers["device"] = resolved.device_type
    answers["job.max_rows"] = config.job.max_rows
    answers[_INPUT_KEY] = None if inputs is None else NOT_READ
    answers[_MODEL_KEY] = resolved.files_digest
    answers |= weight_answers(resolved)
    answers |= adapters
    answers |= media or {}
    answers |= longest_media(resolved)
    answers[_TOKENIZER_KEY] = tokenizer
    answers |= {f"version of {name}": number for name, number in sorted(packages.items())}
    answers[_CODE_KEY] = code_fingerprint()
    answers[_ROW_SUMS_KEY] = resolved.row_sums
    answers[_ARITHMETIC_KEY] = answers[_POLICY_KEY] = NOT_READ
    return {
        "format_version": FORMAT_VERSION,
        "run": secrets.token_hex(8),
        "has_ended": False,
        "answers": answers,
        "config": settings,
        "config_hash": _digest(settings),
        "num_rows": None,
        "shard": _shard_record(config.job),
        "output": absolute_name(output_of(config.job), follows_links=False),
        "version": version(),
        "input": settings["job"]["input"] if inputs is None else list(map(absolute_name, inputs)),
        "model": str(resolved.model_folder.resolve()),
        "model_revision": resolved.location.commit,
        "model_name": resolved.location.name,
        "merged_adapter": None if config.model.merged_adapter is None else f"{config.model.merged_adapter} is {MERGED}",
        "starts": [{"layout": settings["parallel"], "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}],
    }


def check_manifest(run_dir: Path, manifest: dict[str, Any], resume: str, *, has_rows: bool = True) -> bool:
    """Compare with the manifest of a run that has not ended, and add its history. Changes no file. Returns whether
    there is such a run, to resume: one that `has_rows`, since others have no answers that could differ. Raises
    ConfigError naming the first key that differs, unless `resume` is force.
    """
    last = read_manifest(run_dir / MANIFEST_NAME)
    manifest["overridden"] = []
    if last is None or last["has_ended"]:
        return False
    if not has_rows:
        # The name by which it has claimed a folder of parts.
        manifest["run"] = last.get("run", manifest["run"])
        return False
    _check_shard(run_dir, last, manifest)
    now = manifest["answers"]
    # Until they are known the last run's values are kept: this one may end before.
    unknown = [key for key in (_INPUT_KEY, _ARITHMETIC_KEY, _POLICY_KEY) if now[key] == NOT_READ]
    before = {key: last["answers"].get(key) for key in unknown}
    _compare(run_dir, last["answers"], now | before, resume, manifest)
    now |= before
    if last["answers"].get(_MODEL_KEY) == now[_MODEL_KEY]:
        # The name in answers to rows that name no model: the folder may have moved.
        manifest["model_name"] = last.get("model_name", manifest["model_name"])
    manifest["run"] = last.get("run", manifest["run"])
    manifest["overridden"] = [*last["overridden"], *manifest["overridden"]]
    manifest["starts"] = [*last["starts"], *manifest["starts"]]
    return True


def _shard_record(job: JobConfig) -> dict[str, Any] | None:
    """`start` and `stop` are its rows, of `num_job_rows`: known when the input is."""
    shard = Shard.of(job)
    if shard is None:
        return None
    output = absolute_name(output_of(job), follows_links=False)
    return {"index": shard.index, "count": shard.count, "output": output, "start": None, "stop": None}


def _check_shard(run_dir: Path, last: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the last run had the same rows of the job."""
    before, now = [shard_name(each) for each in (last, manifest)]
    if before != now:
        raise ConfigError(
            f"job.run_dir={run_dir} holds a run of {before} that has not ended, and this is {now}: give another "
            f"job.run_dir, or resume that run with its job.shard"
        )


def shard_name(manifest: Mapping[str, Any]) -> str:
    """`shard 3/7`, or `all rows`."""
    # Absent before there were shards.
    shard = manifest.get("shard")
    return "all rows" if shard is None else f"shard {shard['index']}/{shard['count']}"


def write_manifest(run_dir: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, which claims the journal: another job's must be durably removed before. Raises OSError."""
    write_json(run_dir / MANIFEST_NAME, {**manifest, _CHECKSUM_KEY: _digest(manifest)})


def set_input(
    run_dir: Path,
    manifest: dict[str, Any],
    resume: str,
    digest: str | None,
    num_rows: int | None,
    rows: range = range(0),
) -> None:
    """Set the input's digest and number of rows, and write the manifest. `rows` are those of a shard. Raises
    ConfigError if they differ from the last run's, unless `resume` is force; the file is unchanged then.
    """
    manifest["num_rows"] = num_rows
    if manifest["shard"] is not None:
        manifest["num_rows"] = len(rows)
        manifest["shard"] |= {"start": rows.start, "stop": rows.stop, "num_job_rows": num_rows}
    _set(run_dir, manifest, resume, _INPUT_KEY, digest)


def set_arithmetic(
    run_dir: Path, manifest: dict[str, Any], resume: str, arithmetic: str, policy: NumericalPolicy
) -> None:
    """Set the arithmetic of the ranks (order of additions, which differs among processors) and the digest of their
    numerical policy as `set_input` does.
    """
    _set(run_dir, manifest, resume, _ARITHMETIC_KEY, arithmetic)
    manifest["numerical_policy"] = policy.as_dict()
    _set(run_dir, manifest, resume, _POLICY_KEY, policy.digest)


def _set(run_dir: Path, manifest: dict[str, Any], resume: str, key: str, value: str | None) -> None:
    before = manifest["answers"][key]
    if before not in (value, NOT_READ):
        _compare(run_dir, {key: before}, {key: value}, resume, manifest)
    manifest["answers"][key] = value
    write_manifest(run_dir, manifest)


def _compare(
    run_dir: Path, before: Mapping[str, Any], now: Mapping[str, Any], resume: str, manifest: dict[str, Any]
) -> None:
    """Add differences to the manifest's history."""
    values = {key: (before.get(key), now.get(key)) for key in dict.fromkeys([*before, *now])}
    overridden = {key: list(pair) for key, pair in values.items() if pair[0] != pair[1]}
    if overridden and resume != "force":
        # Of a version without these keys the code differs too, which says less.
        new = [_ROW_SUMS_KEY] if _ROW_SUMS_KEY not in before else []
        if not any(map(_is_of_weights, before)) and before.get(_LOAD_FORMAT_KEY) != "dummy":
            new += filter(_is_of_weights, now)
        is_remade = _CODE_KEY in overridden and any(_is_of_weights(key) and key.endswith(SUFFIX) for key in now)
        keys = [key for key in overridden if not (is_remade and key in _MADE_KEYS)]
        key = next((key for key in new if key in overridden), keys[0])
        difference = _difference(run_dir, key, *overridden[key], is_new=key in new)
        raise ConfigError(f"{difference}, give another job.run_dir, or set job.resume=force to resume anyway")
    if overridden:
        manifest["overridden"] = [*manifest["overridden"], overridden]


def _difference(run_dir: Path, key: str, earlier: Any, later: Any, *, is_new: bool) -> str:
    """The difference between a run and its start now, and the first way out. `is_new`: the run's version has no such
    key.
    """
    run = f"the run of job.run_dir={run_dir}"
    if _is_of_weights(key):
        if is_new:
            return (
                f"{run} was begun by a version that does not compare the contents of weights, so the model may be "
                f"another one by now. Resume with that version"
            )
        file = key.removeprefix(_WEIGHTS_PREFIX)
        return f"{file} of model.path has other weights than in {run}: answers would differ. Restore that model"
    if key == _MODEL_KEY:
        return (
            f"config.json, generation_config.json or another file of settings in model.path is not as in {run}: "
            f"answers would differ. Restore these files"
        )
    if key != _ROW_SUMS_KEY:
        return (
            f"{key} is {_short(later)}, and {_short(earlier)} in {run}: answers would differ. Resume with what that "
            f"run had"
        )
    if is_new:
        return (
            f"{run} was begun by a version that adds row-parallel sums in another order; this version adds them "
            f"{later}: the last bits of answers would differ. Resume with that version"
        )
    return (
        f"row-parallel sums are added {later}, and {earlier} in {run}: answers would differ. Resume with a "
        f"parallel.tensor_parallel_size that adds as that run did, and its parallel.max_leaves, "
        f"parallel.invariant_tensor_parallel and executor.device_backend"
    )


def end_manifest(run_dir: Path, manifest: dict[str, Any]) -> None:
    """Mark the job as ended: every row has its answer in the output. Raises OSError."""
    write_manifest(run_dir, {**manifest, "has_ended": True})


def merged_manifest(manifests: Sequence[dict[str, Any]], output: FilePath) -> dict[str, Any]:
    """The manifest of the merged output of all shards of a job, in order."""
    job = {**manifests[0]["config"]["job"], "output": str(output)}
    job |= dict.fromkeys(("shard", "run_dir", "prometheus_file"))
    config = {**manifests[0]["config"], "job": job}
    return {
        **manifests[0],
        # Of equal answers: another merge of the same job writes the same bytes.
        "run": f"merge {_digest(manifests[0]['answers'])}",
        "has_ended": True,
        "config": config,
        "config_hash": _digest(config),
        "num_rows": sum(each["num_rows"] for each in manifests),
        "output": absolute_name(output, follows_links=False),
        "shard": None,
        "overridden": [entry for each in manifests for entry in each["overridden"]],
        "starts": [start for each in manifests for start in each["starts"]],
    }


def read_manifest(
    path: Path, way_out: str = "give another job.run_dir, or remove this one to start over"
) -> dict[str, Any] | None:
    """The manifest; None for a missing file. Raises ConfigError for an invalid or damaged one; OSError."""
    try:
        value = read_json_object(path)
    except FileNotFoundError:
        return None
    except JsonError as error:
        raise ConfigError(f"{error}: {way_out}") from None
    format_version = value.get("format_version")
    if format_version == _UNCHECKED_VERSION and value.get("has_ended") is True:
        # Only that it has ended matters.
        return value
    if format_version != FORMAT_VERSION:
        raise ConfigError(f"{path} is not a manifest of version {FORMAT_VERSION}: {way_out}")
    # A disk fault in a name or number would get into answers.
    if value.pop(_CHECKSUM_KEY, None) != _digest(value):
        raise ConfigError(f"{path} is damaged (its checksum differs): {way_out}")
    return value


def output_in(run_dir: Path, manifest: Mapping[str, Any]) -> FilePath | None:
    """The output of a run: next to its run directory, if both were moved. None for a manifest without a name."""
    shard = manifest.get("shard")
    # Until 0.6.0 as it was given: relative to the job's working directory.
    name = (shard or manifest).get("output") or manifest.get("config", {}).get("job", {}).get("output")
    if not name or isinstance(recorded := file_path(name), RemotePath):
        return file_path(name) if name else None
    names, run_name = [recorded.name], f"{recorded.name.replace('*', '')}.run"
    if shard and is_parts(recorded):
        names = [recorded.parent.name, recorded.name]
        run_name = Shard(shard["index"], shard["count"]).run_of_parts(recorded.name)
    beside = run_dir.absolute().parent.joinpath(*names)
    return beside if run_dir.name == run_name and size_of(last_path(beside)) is not None else recorded


def weight_answers(resolved: ResolvedRun) -> dict[str, str]:
    """Entries of `answers`: the sampled digest of each weight file. Raises CheckpointError and OSError."""
    return {f"{_WEIGHTS_PREFIX}{name}": digest for name, digest in sampled_digests(resolved).items()}


def _is_of_weights(key: str) -> bool:
    return key.startswith(_WEIGHTS_PREFIX)


def _digest(value: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=_HASH_BYTES).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."
