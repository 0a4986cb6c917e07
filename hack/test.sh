#!/bin/sh
# The tests, in two halves side by side: most of what they do is waiting. Arguments go to both runs of pytest; the
# output of the second half comes whole, after the first one's.
set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
rest=$(mktemp)
$python -m pytest tests --ignore=tests/transfer "$@" >"$rest" 2>&1 &
second=$!
# Nothing is left running, also when this is interrupted.
trap 'kill $second 2>/dev/null; rm -f "$rest"' EXIT
$python -m pytest tests/transfer "$@"
first_ended=$?
wait $second
second_ended=$?
cat "$rest"
[ $first_ended -eq 0 ] && [ $second_ended -eq 0 ]
