"""Composes the values in `conf/` and command-line overrides into a frozen `RunConfig`, and formats it as text.

Hydra only composes: it gets no job to run, so it makes no folder, sets up no logging and runs no sweep. Its errors are
rewritten as one sentence: the key, the value, the rule, the way out.
"""

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spmd_worker.base.config.options import groups_of, keys_of, type_words
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.urls import all_without_credentials

SCHEMA_NAME: Final = "run_schema"
EXPERIMENT: Final = "experiment"
"""The group of named runs: its sets hold keys of any group."""

_PLAN: Final = "plan.enabled="
_SHORT_PLAN: Final = re.compile(r"\Aplan=")

_GROUPS: Final = groups_of(RunConfig)
_KEYS: Final = keys_of(RunConfig)
PATH_KEYS: Final = tuple(name for name, key in _KEYS.items() if key.option.is_path)
_NAMING_GROUPS: Final = ("model", "job", "cache", "speculative_config")
_READ_KEYS: Final = ("model.path", "job.input")


def compose_run(
    config_dir: Path,
    overrides: Sequence[str],
    extra_dir: Path | None = None,
    paths: Mapping[str, str] | None = None,
) -> RunConfig:
    """The run that `overrides` describe, over the values in `config_dir`; `extra_dir` adds named sets of its own.

    `paths` are values of `PATH_KEYS` and are applied last. They are used verbatim, and so are paths in `overrides`
    unless they are quoted, null, or contain `${...}`: a path may contain characters that Hydra's grammar gives a
    meaning. In all of them a leading `~` is expanded to a home folder. Raises ConfigError. A `+` before a key makes no
    difference: a key exists or it does not.
    """
    given = [_SHORT_PLAN.sub(_PLAN, override.lstrip("+")) for override in overrides]
    plain = [override for override in given if not _is_literal_path(override)]
    literal = dict(override.split("=", 1) for override in given if _is_literal_path(override))
    # The later of two values of one key counts, in either notation.
    last = {override.partition("=")[0]: override for override in given}
    literal = {key: value for key, value in literal.items() if last[key] == f"{key}={value}"}
    _check_overrides(plain)
    # Quoted, because a path may contain characters that Hydra's grammar gives a meaning.
    folders = [] if extra_dir is None else [f"hydra.searchpath=[{_quoted(f'file://{extra_dir.resolve()}')}]"]
    register_schema()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir.resolve()), job_name="launch"):
            # A mapping's names are its own: Hydra adds keys only with a plus.
            composed = _composed([*(f"+{each}" if "={" in each else each for each in plain), *folders])
            config = to_run_config(composed)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise _explained(error, plain) from None
    except (OSError, UnicodeDecodeError) as error:
        # Hydra's OSErrors about contents have no number.
        is_of_system = isinstance(error, OSError) and error.errno is not None
        way_out = "change that, or give another" if is_of_system else "write YAML"
        raise ConfigError(f"a named set of {extra_dir or config_dir} cannot be read: {error}: {way_out}") from None
    config = _with_paths(config, literal | dict(paths or {}))
    return _with_files_of_checkout(config, last | dict(paths or {}), config_dir.resolve())


def repeated_keys(overrides: Sequence[str], paths: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each key and group to which `compose_run` is given several values: the last one counts, as in
    Hydra, which says nothing.
    """
    values: dict[str, list[str]] = {}
    for text in [*overrides, *(f"{key}={value}" for key, value in (paths or {}).items())]:
        key, _, value = text.lstrip("+").partition("=")
        values.setdefault(key, []).append(value)
    return [
        f"{key} is given {len(given)} times, as {' and '.join(given)}: the last one counts: leave the others out"
        for key, given in values.items()
        if len(dict.fromkeys(given)) > 1
    ]


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Hydra's composition. Raises ConfigError where Hydra raises built-in errors, and what Hydra raises else."""
    try:
        return compose("config", list(overrides))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        reason = (
            "a set includes itself, or has values nested too deep" if isinstance(error, RecursionError) else str(error)
        )
        raise ConfigError(
            f"defaults of a named set cannot be used ({reason}): give a list of sets, as in [{{override /model: demo}}]"
        ) from None


def _with_files_of_checkout(config: RunConfig, given: Mapping[str, str], config_dir: Path) -> RunConfig:
    """The run with those files of a named set that are not on the command line looked up next to `config_dir` where
    they do not exist: a demo works from any folder. An installed package has none of them. Raises ConfigError.
    """
    for key in _READ_KEYS:
        group, _, name = key.partition(".")
        path = getattr(getattr(config, group), name)
        if path is None or key in given or Path(path).exists():
            continue
        found = config_dir.parent / path
        if found.exists():
            config = _with_value(config, key, str(found))
        elif any(path in each.read_text(encoding="utf-8") for each in config_dir.rglob("*.yaml")):
            raise ConfigError(
                f"{key}={path} is in the repository, and not in an installed package: give {key}=PATH, or start the "
                f"command in a checkout"
            )
    return config


def named_sets(config_dirs: Sequence[Path]) -> dict[str, list[str]]:
    """Group -> the names that can be chosen in it, both sorted."""
    groups = sorted([*_GROUPS, EXPERIMENT])
    return {
        group: sorted(path.stem for folder in config_dirs for path in (folder / group).glob("*.yaml"))
        for group in groups
    }


def register_schema() -> None:
    """Register `RunConfig` with Hydra under `SCHEMA_NAME`. Idempotent.

    OmegaConf makes nodes of frozen dataclasses read-only, which would reject every override: the flag is cleared on the
    schema, which still accepts no unknown keys, and the result of `to_run_config` is frozen again.
    """
    store = ConfigStore.instance()
    if f"{SCHEMA_NAME}.yaml" in store.repo:
        return
    schema = OmegaConf.structured(RunConfig)
    for node in (schema, *(schema._get_node(key) for key in schema)):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, None)
            node._set_flag("readonly", False)
    for key in _KEYS.values():
        if key.default is None and dict[str, str] in typing.get_args(key.hint):
            # OmegaConf merges no mapping into None, and a node in struct mode takes no new names.
            OmegaConf.update(schema, key.name, {}, merge=False)
            OmegaConf.set_struct(OmegaConf.select(schema, key.name), False)
    store.store(name=SCHEMA_NAME, node=schema)


def to_run_config(composed: DictConfig) -> RunConfig:
    """Build the frozen objects, with their checks. Raises ConfigError."""
    with read_write(composed):
        config = OmegaConf.to_object(composed)
    assert isinstance(config, RunConfig), type(config)
    return config


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def shown_values(config: RunConfig) -> dict[str, Any]:
    """`as_plain` without users and queries of names, of files, models and connectors: other texts are no names."""
    values = as_plain(config)
    return values | {group: all_without_credentials(values[group]) for group in _NAMING_GROUPS}


def as_yaml(values: Any) -> str:
    """Plain values, or a complete RunConfig, as YAML in the order of declaration."""
    return OmegaConf.to_yaml(OmegaConf.create(as_plain(values) if isinstance(values, RunConfig) else values))


def _quoted(text: str) -> str:
    """Text quoted for Hydra's grammar: backslashes count where a quote comes after them."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _in_shell(text: str) -> str:
    """Text in double quotes of the shell, with a backslash before what they leave its meaning."""
    escaped = re.sub(r'\\{2,}|\\(?=["$`])|["$`]', lambda found: "".join([f"\\{each}" for each in found[0]]), text)
    return f'"{escaped}"'


def _is_literal_path(override: str) -> bool:
    """Whether the override gives a path that bypasses Hydra."""
    key, sign, value = override.partition("=")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return key in PATH_KEYS and bool(sign) and not is_quoted and value != "null" and "${" not in value


def _with_paths(config: RunConfig, literal: Mapping[str, str]) -> RunConfig:
    """The run with these paths, and a leading `~` expanded in all of them."""
    for key in PATH_KEYS:
        group, _, name = key.partition(".")
        path = literal.get(key, getattr(getattr(config, group), name))
        if path is not None:
            config = _with_value(config, key, os.path.expanduser(path))
    return config


def _with_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    group, _, name = key.partition(".")
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{name: value})})


def _check_overrides(overrides: Sequence[str]) -> None:
    """Reject overrides that are not one value of one known key, before Hydra does."""
    parser = OverridesParser.create()
    for text in overrides:
        if text.startswith("~"):
            raise ConfigError(f"{text}: keys cannot be removed; leave it out, or give the key another value")
        override = _parse(parser, text)
        if override.is_hydra_override():
            raise ConfigError(
                f"{text}: Hydra's own settings cannot be changed here; Hydra only composes the configuration, and "
                f"job.run_dir is where a run writes"
            )
        if override.is_sweep_override():
            key = override.key_or_group
            raise ConfigError(
                f"{text} has several values and a command runs one job: give one value and start the command once for "
                f"each (a list is {key}=[a,b], a comma in a text is \"{key}='a,b'\")"
            )
        _check_known(override, text)


def _parse(parser: OverridesParser, text: str) -> Override:
    if "=" not in text:
        raise ConfigError(f"{text} is not an override: write KEY=VALUE, such as cache.num_blocks=512")
    key, _, value = text.partition("=")
    try:
        return parser.parse_overrides([text])[0]
    except ValueError:  # a number of thousands of digits
        raise ConfigError(f"{key}: a number of {len(value)} digits is too long") from None
    except OverrideParseException:
        # A quote that begins the value may lack its end.
        text_in_quotes = _quoted(value.strip("'\"") if value.startswith(("'", '"')) else value)
        raise ConfigError(
            f"{text} cannot be read: a value with one of = ( ) [ ] {{ }} # ~ or a letter beyond ASCII needs quotes "
            f"that the shell leaves in place, as in {_in_shell(f'{key}={text_in_quotes}')}"
        ) from None


def _check_known(override: Override, text: str) -> None:
    key = override.key_or_group
    if key in _GROUPS or key == EXPERIMENT:
        # A group's value is a name; Hydra reports a name that does not exist.
        if not isinstance(override.value(), str):
            way_out = f"choose a named set, as in {key}=NAME (--help lists them), or leave it out"
            raise ConfigError(f"{text} is not the name of a set of values: {way_out}")
    elif key not in _KEYS:
        raise _unknown_key(key, text)


def _unknown_key(key: str, where: str) -> ConfigError:
    nearest = _nearest_keys(key)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    is_sure = len(nearest) == 1 and "." in nearest[0]
    group = next(iter(difflib.get_close_matches(key.partition(".")[0], _GROUPS, n=1)), None)
    if "." in key and group is not None and not is_sure:
        names = [each.partition(".")[2] for each in _KEYS if each.startswith(f"{group}.")]
        return ConfigError(f"{where}: there is no key {key}; {hint}{group} has {', '.join(names)}")
    return ConfigError(f"{where}: there is no key {key}; {hint}--help=all lists all")


def _nearest_keys(key: str) -> list[str]:
    """Three at most: keys with the same last word in any group, then similar ones; one if it is almost the key."""
    known = [*_KEYS, *_GROUPS, EXPERIMENT]
    same_word = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]
    # High enough that keys which merely share their group's name do not count.
    alike = difflib.get_close_matches(key, known, n=3, cutoff=0.8)
    if alike and difflib.SequenceMatcher(None, alike[0], key).ratio() > 0.9:
        return alike[:1]
    return list(dict.fromkeys([*same_word, *alike]))[:3]


def _explained(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """An error of Hydra or OmegaConf, in one sentence."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return ConfigError(f"{group}={name} is not one of {', '.join(error.options or ['(none)'])}")
    text = "\n".join(str(each) for each in (error, error.__cause__) if each is not None)
    found, file = re.search(r"full_key: (\S+)", text), re.search(r"In '([^']+)'", text)
    if found is None and file is not None and re.search("Merge error|Cannot merge", text):
        return ConfigError(f"{file[1]}.yaml must be keys and values, as in KEY: VALUE ({_reason(text)})")
    if found is None:
        return ConfigError(" ".join(text.split()))
    # An entry of a list or a mapping is a value of the key.
    key = re.sub(r"\[\d+\]$", "", found[1])
    key = next((each for each in _KEYS if key.startswith(f"{each}.")), key)
    # The override as typed; for a value in a file only the file's name is known.
    given = next((each for each in reversed(overrides) if each.partition("=")[0] == key), None)
    where = (given or (f"{file[1]}.yaml: {key}" if file else key)).replace(_PLAN, "plan=")
    if re.search(r"Key '.*' not in '", text):
        return _unknown_key(key, where)
    reason = "" if key in _KEYS and given and "$" not in given else f" ({_reason(text)})"
    return ConfigError(f"{where} must be {type_words(_KEYS[key].hint) if key in _KEYS else 'keys and values'}{reason}")


def _reason(text: str) -> str:
    """OmegaConf's error, without Hydra's lines around it."""
    lines = [line for line in text.splitlines() if line and not line.startswith(("In '", "Error merging", "    "))]
    return lines[0] if lines else "no reason given"
