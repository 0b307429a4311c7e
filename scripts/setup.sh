#!/usr/bin/env bash
# Brings the machine to where CMake can run: Debian packages, and a virtual environment with LibTorch (the torch wheel:
# its headers and libraries), cmake and ninja. Quick when everything is there.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${FSDP_TORCH_VERSION:-2.11.0}
packages=(g++ git make python3 python3-venv libgloo-dev libgtest-dev libgmock-dev ccache)
if [[ ${1:-} == --with-format ]]; then packages+=(clang-format); fi

missing=()
if command -v dpkg-query >/dev/null; then
  for p in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${Status}' "$p" 2>/dev/null) == "install ok installed" ]] || missing+=("$p")
  done
else
  echo "setup: not a Debian system; this should be installed, or its like: ${packages[*]}" >&2
fi
if ((${#missing[@]})); then
  by_hand="setup: could not install packages; as root, run: apt-get install ${missing[*]}"
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { echo "$by_hand" >&2; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" ||
    { echo "$by_hand" >&2; exit 1; }
fi

stamp=.venv/fsdp-$torch_version
if [[ ! -e $stamp ]]; then
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==$torch_version" numpy "cmake<4" ninja
  touch "$stamp"
fi
