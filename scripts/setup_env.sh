#!/usr/bin/env bash
# Makes .venv in the repository's root, with this project installed in place and the versions of constraints.txt.
#
#   bash scripts/setup_env.sh          what running needs
#   bash scripts/setup_env.sh --dev    what the tests need too
#
# PYTHON names the interpreter (3.11 or newer, default python3). A second run with nothing changed does nothing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/.setup-stamp
log=$venv/setup.log

fail() {
  printf 'setup_env.sh: %s\n' "$*" >&2
  exit 1
}

extras=run
for argument in "$@"; do
  case $argument in
    --dev) extras=dev ;;
    *) fail "unknown argument $argument: the only one is --dev" ;;
  esac
done

checksum=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
made_for='' installed_checksum='' installed_extras=''
if [ -x "$venv/bin/python" ] && [ -f "$stamp" ]; then
  { read -r made_for && read -r installed_checksum && read -r installed_extras; } <"$stamp" || true
fi
# What once had the dev extras keeps them.
[ "$installed_extras" != dev ] || extras=dev
if [ "$made_for $installed_checksum $installed_extras" = "$root $checksum $extras" ]; then
  exit 0
fi

run_quietly() {
  "$@" >"$log" 2>&1 && return
  cat "$log" >&2
  fail "failed: $*"
}

make_venv() {
  # `--clear` would empty the folder behind it, which another checkout uses.
  [ ! -L "$venv" ] ||
    fail ".venv is a link to $(readlink "$venv"), made for ${made_for:-no checkout}: remove the link, or use that environment's python"
  local python=${PYTHON:-python3}
  command -v "$python" >/dev/null || fail "no $python found: set PYTHON to an interpreter of 3.11 or newer"
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is Python $version and 3.11 or newer is needed: set PYTHON to such an interpreter"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments: install its venv package (python$version-venv on Debian and Ubuntu)"
  "$python" -m venv --clear "$venv"
}

is_ours() {
  # A copied .venv points at the tree that it was made for. One without a stamp was left unfinished: pip completes it.
  [ -z "$made_for" ] || [ "$made_for" = "$root" ] || return 1
  [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

is_ours || make_venv
rm -f "$stamp"
printf 'setup_env.sh: installing into .venv, which takes minutes the first time\n' >&2

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip_major=$("$venv/bin/python" -c 'import pip; print(pip.__version__.split(".")[0])')
# One of 25 installs in two thirds of the time; where it cannot be had, one of 23 will do.
if [ "$pip_major" -lt 25 ] && ! "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25' >"$log" 2>&1; then
  [ "$pip_major" -ge 23 ] || run_quietly "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=23'
fi

project=$root compile=--compile
# Of all that tests need they import a part: Python compiles it then, and half of the time here was for the rest.
[ "$extras" = run ] || project="$root[$extras]" compile=--no-compile
# One call: torch comes in the version that constraints.txt pins, never in a newer one that is replaced afterwards.
run_quietly "$venv/bin/python" -m pip install --quiet "$compile" --editable "$project" --constraint "$root/constraints.txt"
printf '%s\n' "$root" "$checksum" "$extras" >"$stamp"
