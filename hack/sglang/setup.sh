#!/bin/sh
# SGLang 0.5.23 that runs on a CPU, in an environment of its own (7 GB, 3-5 minutes), in the cache and keyed by what
# it is made of. For the benchmark's rival and the tests against the real engine; nothing else needs it.
#   hack/sglang/setup.sh          make it if it is not there; prints its path
#   hack/sglang/setup.sh --path   print its path, or fail if it is not there
# Interrupted, it goes on where it was. cpu.env holds the variables to run it with.
set -eu
cd "$(dirname "$0")"
cache=${PDCLUSTER_CACHE:-$HOME/.cache/pdcluster}
python=${PYTHON:-python3}
key=$( { cat requirements.txt torchvision_ops.py sgl_kernel/*.py; "$python" -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum | cut -c1-16)
env=$cache/sglang/$key

if [ "${1:-}" = --path ]; then
    [ -f "$env/.complete" ] || { echo "sglang: not installed; run make sglang-env" >&2; exit 1; }
    echo "$env"
    exit 0
fi

mkdir -p "$cache/sglang"
exec 9>"$cache/sglang/$key.lock"
flock 9 # another checkout may be making the same one
if [ ! -f "$env/.complete" ]; then
    echo "sglang: installing into $env (once, about 7 GB)" >&2
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    "$env/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r requirements.txt >&2
    "$env/bin/python" torchvision_ops.py
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site/sgl_kernel"
    cp -r sgl_kernel "$site/sgl_kernel"
    echo "sglang: importing it" >&2
    (
        set -a
        . ./cpu.env
        exec "$env/bin/python" -W ignore -c 'import sglang.srt.disaggregation.nixl.conn, sglang.srt.server_args'
    ) >&2
    touch "$env/.complete"
fi
echo "$env"
