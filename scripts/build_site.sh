#!/usr/bin/env bash
# Builds the documentation's site from docs/ into site/, in an environment of its own, .venv-site.
#
#   bash scripts/build_site.sh            build; a broken link or a page that is not in the navigation is an error
#   bash scripts/build_site.sh --serve    build, and serve it on 127.0.0.1:8001 until Ctrl-C, with changes
#
# PYTHON names the interpreter (3.11 or newer, default python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$root/.venv-site
stamp=$venv/.setup-stamp

is_served=
for argument in "$@"; do
  case $argument in
    --serve) is_served=yes ;;
    *) printf 'build_site.sh: unknown argument %s: the only one is --serve\n' "$argument" >&2; exit 1 ;;
  esac
done

checksum=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
if [ ! -x "$venv/bin/python" ] || [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$checksum" ]; then
  printf 'build_site.sh: installing into .venv-site\n' >&2
  "${PYTHON:-python3}" -m venv "$venv"
  # The extra alone: the site needs neither this project nor torch.
  requirements=$("$venv/bin/python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["site"], sep="\n")')
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
  printf '%s\n' "$requirements" |
    "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --requirement /dev/stdin
  printf '%s\n' "$checksum" >"$stamp"
fi

# Material for MkDocs says that it is maintained until May 2027, and that Zensical reads mkdocs.yml after that.
export NO_MKDOCS_2_WARNING=1
# Not --quiet: that drops the warnings that --strict counts.
"$venv/bin/python" -m mkdocs build --strict --clean
printf 'site/index.html and %s other pages\n' "$(($(find site -name '*.html' | wc -l) - 1))"
[ -z "$is_served" ] || exec "$venv/bin/python" -m mkdocs serve --strict --dev-addr 127.0.0.1:8001
