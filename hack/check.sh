#!/bin/sh
# One command that checks everything: format, lint, types, import contracts, CRD drift, chart.
set -u
cd "$(dirname "$0")/.."
py=.venv/bin/python
status=0
step() {
    name=$1; shift
    if out=$("$@" 2>&1); then printf 'ok    %s\n' "$name"; else printf 'FAIL  %s\n%s\n' "$name" "$out"; status=1; fi
}
step "format (ruff)" $py -m ruff format --check .
step "lint (ruff)" $py -m ruff check .
step "types (mypy strict)" $py -m mypy
step "import contracts (import-linter)" $py -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))'
step "CRD drift" $py -m pdoperator.api.crd --check
helm=$(python3 -m e2e.cluster tool helm) || helm=$(command -v helm || true)
if [ -n "$helm" ]; then step "chart (helm lint)" "$helm" lint --strict charts/pdcluster
else printf 'FAIL  chart (helm lint): no helm; run make tools\n'; status=1; fi
exit $status
