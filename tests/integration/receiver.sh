#!/bin/sh
# A receiver in shell, written from deploy/retrain-pipeline/README.md alone: a CGI program with curl, openssl and jq.
# SECRET and FOLDER come from the environment; the headers as CGI names them, the body on stdin.
set -eu
answer() { printf 'Status: %s\r\n\r\n' "$1"; exit 0; }
body=$(mktemp)
trap 'rm -f "$body"' EXIT
cat >"$body"

age=$(($(date +%s) - HTTP_WEBHOOK_TIMESTAMP))
[ "${age#-}" -le 300 ] || answer 401
key=$(printf %s "${SECRET#whsec_}" | openssl base64 -d -A | od -An -v -tx1 | tr -d ' \n')
expected=$({ printf '%s.%s.' "$HTTP_WEBHOOK_ID" "$HTTP_WEBHOOK_TIMESTAMP"; cat "$body"; } |
    openssl dgst -sha256 -mac HMAC -macopt "hexkey:$key" -binary | openssl base64 -A)
case " $HTTP_WEBHOOK_SIGNATURE " in *" v1,$expected "*) ;; *) answer 401 ;; esac

[ "$(jq -r .type "$body")" = driftwatch.retrain.requested ] || answer 204
run=$FOLDER/$(printf %s "$HTTP_WEBHOOK_ID" | openssl dgst -sha256 -r | cut -c1-16)
mkdir "$run" 2>/dev/null || answer 204 # it came before
curl -sf "$(jq -r .data.data.uri "$body")" -o "$run/train.jsonl"
[ "$(openssl dgst -sha256 -r "$run/train.jsonl" | cut -d' ' -f1)" = "$(jq -r .data.data.sha256 "$body")" ] || answer 500
jq -r .data.specforge.run_configuration "$body" | sed "s#OUTPUT_DIR#$run#" >"$run/run.yaml"
curl -sf -X POST "$(jq -r .data.callback.url "$body")/state" -d '{"state": "training"}' -o "$run/state.json" \
    -H "authorization: Bearer $(jq -r .data.callback.token "$body")" -H 'content-type: application/json'
answer 204
