#!/usr/bin/env bash
# `make test-deploy`: packages (when root), linters, then every test of tests/deploy. $1 is the
# deployment's virtual environment, the rest goes to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=$PWD/${1:?a virtual environment}
shift
export PATH=$venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1

mapfile -t wanted < <(grep -v '^#' tests/deploy/apt.txt)
missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  if ((EUID != 0)); then
    echo "error: install ${missing[*]} (tests/deploy/apt.txt), or run as root" >&2
    exit 1
  fi
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

# promtool alone, out of Debian's package: installing that would start a server
tools=$PWD/build/deploy-tools
if ! command -v promtool > /dev/null && [[ ! -x $tools/usr/bin/promtool ]]; then
  mkdir -p "$tools"
  # apt's own user cannot write below root's folders; root fetches then
  (cd "$tools" && apt-get download -q -o APT::Sandbox::User=root prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb)
fi
PATH=$tools/usr/bin:$PATH

echo "== linters"
(cd deploy && ansible-lint --offline --profile production -q)
yamllint --strict deploy tests/deploy
shellcheck tests/deploy/run.sh tests/deploy/testbed/*.sh

echo "== tests"
exec python -m pytest -q tests/deploy --durations=15 "$@"
