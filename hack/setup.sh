#!/bin/sh
# Makes .venv: this checkout's console scripts and editable install, on top of a layer of third-party
# packages that all checkouts share (5 GB with torch). The layer lives in the cache, keyed by the
# pinned versions and the interpreter; a changed constraints.txt makes a new one (old ones may be deleted).
set -eu
cd "$(dirname "$0")/.."
cache=${PDCLUSTER_CACHE:-$HOME/.cache/pdcluster}
python=${PYTHON:-python3}

"$python" - <<'PY' || { echo "setup: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
raise SystemExit(sys.version_info < (3, 11))
PY
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "setup: installing Debian's python3-venv (this Python has no ensurepip)" >&2
    apt-get update -qq && apt-get install -y -qq python3-venv
fi

key=$( { cat constraints.txt hack/requirements.txt; "$python" -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum | cut -c1-16)
layer=$cache/python/$key
mkdir -p "$cache/python"
exec 9>"$cache/python/$key.lock"
flock 9 # another checkout may be making the same layer
if [ ! -f "$layer/.complete" ]; then
    echo "setup: installing third-party packages into $layer (once, about 5 GB)" >&2
    rm -rf "$layer"
    "$python" -m venv "$layer"
    "$layer/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -r hack/requirements.txt
    touch "$layer/.complete"
fi
exec 9>&-

if [ ! -x .venv/bin/python ] || [ "$(cat .venv/.layer 2>/dev/null)" != "$layer" ]; then
    rm -rf .venv
    # Without pip and setuptools of its own: those of the layer are pinned, the bundled ones are old.
    "$python" -m venv --without-pip .venv
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$layer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/pdcluster-layer.pth"
    echo "$layer" > .venv/.layer
fi
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
# The router is a program of a package in the layer; pods look for it beside ours.
ln -sf "$layer/bin/smg" .venv/bin/smg
touch .venv/.ready
