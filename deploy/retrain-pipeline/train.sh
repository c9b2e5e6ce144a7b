#!/bin/sh
# Train with SpecForge 0.2.0, in the folder of one request (request.json, run.yaml, train.jsonl); the draft lies in ./draft
# at the end. CAPTURE_SERVER and MOONCAKE_SERVER are the hosts of the patched SGLang and of Mooncake; without the first the
# target's hidden states are written here beforehand, by driftwatch with its extra [shadow].
set -eu
line() { # a command line of the request, or one that does nothing
    python3 -c '
import json, os, sys
lines = json.load(open("request.json"))["data"]["specforge"]["commands"]
print(lines.get(sys.argv[1], ":").replace("OUTPUT_DIR", os.getcwd()))' "$1"
}
steps="mapping features_of_rows train_offline export"
if [ -n "${CAPTURE_SERVER:-}" ]; then
    steps="mapping plan train export"
    sed -i "s#CAPTURE_SERVER#$CAPTURE_SERVER#; s#MOONCAKE_SERVER#$MOONCAKE_SERVER#" run.yaml
fi
for step in $steps; do
    [ "$step" = features_of_rows ] && [ -d features ] && continue # a second try: they appear whole
    line "$step" >"$step.sh"
    sh -eu "$step.sh"
done
