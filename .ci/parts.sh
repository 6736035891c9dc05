# Sourced by scripts beside it, which define `prepare` and `run` and end with `parts "$@"`:
#   bash .ci/NAME                    both, in a folder that is removed at the end
#   bash .ci/NAME prepare FOLDER     installs what it needs there
#   bash .ci/NAME run FOLDER         the rest, later
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # uv compiles nothing, and hundreds of processes would compile the same modules

parts() {
  if [ $# -gt 0 ]; then
    mkdir -p "$2"
    work=$(realpath "$2")
    "$1"
  else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    prepare
    run
  fi
}

environment() { # NAME PACKAGES...: makes $work/NAME
  with_uv
  "$UV" venv -q --seed -p "$(command -v python3)" "$work/$1"
  install "$work/$1" "${@:2}"
}

install() { # ENVIRONMENT PACKAGES...
  with_uv
  "$UV" pip install -q -p "$1/bin/python" "${@:2}"
}

with_uv() { # UV, or one of its own: pip would try one version after another for minutes
  if [ -z "${UV:-}" ]; then
    python3 -m venv "$work/uv"
    "$work/uv/bin/pip" install -q uv
    export UV="$work/uv/bin/uv"
  fi
  local links=${PIP_FIND_LINKS:-$("$(dirname "$UV")/pip" config get global.find-links 2> /dev/null || true)}
  export UV_FIND_LINKS=${links// /,}
}
