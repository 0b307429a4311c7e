#!/usr/bin/env bash
# Brings the machine to where CMake can run: Debian packages, and a virtual environment with LibTorch (the torch wheel:
# its headers and libraries), cmake and ninja. Quick when everything is there.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${FSDP_TORCH_VERSION:-2.11.0}
packages=(g++ git make python3 python3-venv libgloo-dev libgtest-dev libgmock-dev ccache)
if [[ ${1:-} == --with-format ]]; then packages+=(clang-format); fi

missing=()
for p in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${Status}' "$p" 2>/dev/null) == "install ok installed" ]] || missing+=("$p")
done
if ((${#missing[@]})); then
  if ! command -v apt-get >/dev/null; then
    echo "setup: install these (or their like on your system) first: ${missing[*]}" >&2
    exit 1
  fi
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { echo "setup: as root, run: apt-get install ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
fi

stamp=.venv/fsdp-$torch_version
if [[ ! -e $stamp ]]; then
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==$torch_version" numpy "cmake<4" ninja
  touch "$stamp"
fi
