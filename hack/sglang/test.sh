#!/bin/sh
# Runs tests/sglang with SGLang's own Python, which has no pytest: this checkout's .venv lends pytest and hypothesis (and only
# that) through a folder of links. Arguments go to pytest; where none of them names a path the whole folder runs.
set -eu
cd "$(dirname "$0")/../.."
root=$(pwd)
env=$(hack/sglang/setup.sh --path)
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT INT TERM
.venv/bin/python hack/sglang/lend_pytest.py "$tools"
.venv/bin/python hack/sglang/entry_point.py "$tools"
set -a
. hack/sglang/cpu.env
set +a
export PYTHONPATH="$tools:$root/transfer:$root/operator:$root"
case " $*" in *" tests/"*) ;; *) set -- tests/sglang "$@" ;; esac
"$env/bin/python" -m pytest -p no:cacheprovider -p pytest_timeout "$@"
