// A receiver in JavaScript, written from deploy/retrain-pipeline/README.md and the schemas alone: Node's own library.
// node receiver.mjs SECRET FOLDER CANDIDATES: prints its port; a verdict lies in FOLDER/verdict.json at the end.
import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const [secret, folder, candidates] = process.argv.slice(2);
const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");

function verified(headers, body) {
  if (Math.abs(Date.now() / 1000 - Number(headers["webhook-timestamp"])) > 300) return false;
  const signed = Buffer.concat([Buffer.from(`${headers["webhook-id"]}.${headers["webhook-timestamp"]}.`), body]);
  const expected = Buffer.from("v1," + createHmac("sha256", key).update(signed).digest("base64"));
  return (headers["webhook-signature"] ?? "").split(" ").map((one) => Buffer.from(one))
    .some((one) => one.length === expected.length && timingSafeEqual(one, expected));
}

async function report(callback, what, body) {
  const headers = { authorization: `Bearer ${callback.token}`, "content-type": "application/json" };
  const answer = await fetch(`${callback.url}/${what}`, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok && answer.status !== 409) throw new Error(`${what}: ${answer.status} ${await answer.text()}`);
}

async function train({ data, specforge, callback, retrain_id }) {
  const run = join(candidates, retrain_id);
  mkdirSync(run);
  await report(callback, "state", { state: "accepted" });
  for (const [name, uri, sha256] of [["train", data.uri, data.sha256], ["eval", data.eval_uri, data.eval_sha256]]) {
    const content = readFileSync(fileURLToPath(uri));
    if (createHash("sha256").update(content).digest("hex") !== sha256) throw new Error(`${uri} is not what was announced`);
    writeFileSync(join(run, `${name}.jsonl`), content);
  }
  writeFileSync(join(run, "run.yaml"), specforge.run_configuration.replaceAll("OUTPUT_DIR", run));
  await report(callback, "state", { state: "training" });
  mkdirSync(join(run, "draft")); // where training would leave it
  await report(callback, "candidate", { path: join(run, "draft"), loss: 1.25 });
}

createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const body = Buffer.concat(chunks);
  if (!verified(request.headers, body)) return response.writeHead(401).end();
  const event = JSON.parse(body);
  const kept = join(folder, createHash("sha256").update(event.id).digest("hex"));
  if (!existsSync(kept)) {
    writeFileSync(`${kept}.part`, body);
    renameSync(`${kept}.part`, kept);
    if (event.type === "driftwatch.retrain.requested") train(event.data).catch((error) => console.error(error));
    if (event.type === "driftwatch.candidate.verdict") writeFileSync(join(folder, "verdict.json"), JSON.stringify(event.data));
  }
  response.writeHead(204).end();
}).listen(0, "127.0.0.1", function () { console.log(this.address().port); });
