#!/bin/sh
# Train with SpecForge 0.2.0, in the folder of one request (request.json, run.yaml, train.jsonl); the draft lies in ./draft
# at the end. CAPTURE_SERVER and MOONCAKE_SERVER are the hosts of the patched SGLang and of Mooncake.
set -eu
line() { # a command line of the request, or one that does nothing
    python3 -c '
import json, os, sys
lines = json.load(open("request.json"))["data"]["specforge"]["commands"]
print(lines.get(sys.argv[1], ":").replace("OUTPUT_DIR", os.getcwd()))' "$1"
}
sed -i "s#CAPTURE_SERVER#$CAPTURE_SERVER#; s#MOONCAKE_SERVER#$MOONCAKE_SERVER#" run.yaml
for step in mapping plan train export; do
    line "$step" >"$step.sh"
    sh -eu "$step.sh"
done
