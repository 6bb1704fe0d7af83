// A web backend that serves completions from Springtide and reports what its users did with them.
//
// What it shows
//   POST /complete  {"prompt": "…", "user": "ada"}           -> {"text", "generation_id", "show"}
//   POST /outcome   {"generation_id": "…", "accepted": true}  -> {"feedback_id"}
//                   with "kept": 12 if the user kept the first 12 characters alone
//
//   The browser keeps the generation_id and sends it back with the user's decision. The backend names
//   each feedback event with an idempotency key, so it can repeat the request until it is acknowledged.
//
// How to run it (Node 22.6 or newer, no dependencies; from 22.18 on the flag is not needed)
//   make up                                                           # in another terminal
//   node --experimental-strip-types examples/feedback.mts --once       # one request, one feedback event
//   node --experimental-strip-types examples/feedback.mts              # http://127.0.0.1:8080
//
//   curl -s http://127.0.0.1:8080/complete -d '{"prompt": "fn main() {\n    let x = <|cut|>", "user": "ada"}'
//
// What you see with --once
//   shown by version 17 (champion): "Vec::new();"
//   feedback 019aa5e6-2f41-7abc-8def-0123456789ab is acknowledged
//   or "the policy declined": then there is nothing to show, and no feedback to send.

import { createServer, type IncomingMessage } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";

const SERVE = process.env.SPRINGTIDE_SERVE ?? "http://127.0.0.1:8000";
const INGEST = process.env.SPRINGTIDE_INGEST ?? "http://127.0.0.1:8001";
const API_KEY = process.env.SPRINGTIDE_API_KEY;

// Statuses after which the same request may succeed later.
const TRY_AGAIN = new Set([408, 429, 500, 502, 503, 507]);
const TRIES_MAX = 8;

/** The fields of a choice that this program uses; there are more. */
type Choice = {
  text: string;
  generation_id: string;
  version: number;
  arm: string;
  declined: boolean;
};

/** An answer that will not change if the request is sent again. */
class Refused extends Error {}

/** Sends JSON until it is answered for good. The caller makes the request safe to repeat. */
async function post(url: string, body: unknown, headers: Record<string, string> = {}): Promise<any> {
  const all: Record<string, string> = { "content-type": "application/json", ...headers };
  if (API_KEY) all.authorization = `Bearer ${API_KEY}`;
  for (let attempt = 1; ; attempt++) {
    let wait = 1;
    try {
      const request = { method: "POST", headers: all, body: JSON.stringify(body) };
      const answer = await fetch(url, { ...request, signal: AbortSignal.timeout(30_000) });
      if (answer.ok) return await answer.json();
      const problem = `${url}: ${answer.status} ${await answer.text()}`;
      if (!TRY_AGAIN.has(answer.status) || attempt === TRIES_MAX) throw new Refused(problem);
      wait = Number(answer.headers.get("retry-after") ?? 1);
    } catch (error) {
      // Otherwise the connection broke: it is unknown whether the request arrived.
      if (error instanceof Refused) throw error;
      if (attempt === TRIES_MAX) throw new Refused(`${url}: ${error}`);
    }
    await sleep(wait * 1000);
  }
}

/** One choice. `user` decides the arm, so the same user always gets the same one. */
async function complete(prompt: string, user: string): Promise<Choice> {
  const body = { model: "demo", prompt, max_tokens: 16, user };
  return (await post(`${SERVE}/v1/completions`, body)).choices[0];
}

/** Reports the user's decision. Sending the same decision again is a no-op; another one is a 409. */
async function feedBack(generationId: string, accepted: boolean, kept?: number): Promise<string> {
  const give = async (metric: string, value: boolean | number) => {
    const body = { generation_id: generationId, metric_name: metric, value };
    const key = { "idempotency-key": `${metric}-${generationId}` };
    return (await post(`${INGEST}/v1/feedback`, body, key)).feedback_id;
  };
  if (kept !== undefined) await give("kept_characters", kept);
  return give("accept", accepted); // last: some surfaces close with it
}

async function route(path: string, body: any): Promise<[number, unknown]> {
  if (path === "/complete") {
    if (typeof body?.prompt !== "string" || typeof body?.user !== "string") {
      return [400, { error: "give prompt and user" }];
    }
    const choice = await complete(body.prompt, body.user);
    return [200, { text: choice.text, generation_id: choice.generation_id, show: !choice.declined }];
  }
  if (path === "/outcome") {
    if (typeof body?.generation_id !== "string" || typeof body?.accepted !== "boolean") {
      return [400, { error: "give generation_id and accepted" }];
    }
    return [200, { feedback_id: await feedBack(body.generation_id, body.accepted, body.kept) }];
  }
  return [404, { error: "POST /complete or /outcome" }];
}

async function readJson(request: IncomingMessage): Promise<unknown> {
  let text = "";
  for await (const chunk of request) text += chunk;
  return JSON.parse(text);
}

async function once(): Promise<void> {
  const prompt = "    /// Returns the number of elements.\n    pub fn len(&self) -> <|cut|>";
  const choice = await complete(prompt, "ada");
  const from = `version ${choice.version} (${choice.arm})`;
  if (choice.declined) {
    console.log(`the policy declined, ${from}: nothing to show`);
    return;
  }
  console.log(`shown by ${from}: ${JSON.stringify(choice.text)}`);
  const accepted = choice.text.trim().startsWith("usize"); // a user would decide this
  console.log(`feedback ${await feedBack(choice.generation_id, accepted)} is acknowledged`);
}

function listen(port: number): void {
  const server = createServer(async (request, response) => {
    let status: number;
    let body: unknown;
    try {
      [status, body] = await route(request.url ?? "", await readJson(request));
    } catch (error) {
      [status, body] = [error instanceof SyntaxError ? 400 : 502, { error: String(error) }];
    }
    response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
  });
  server.listen(port, "127.0.0.1", () => console.log(`listening on http://127.0.0.1:${port}; Ctrl-C stops it`));
}

if (process.argv.includes("--once")) {
  try {
    await once();
  } catch (error) {
    console.error(`feedback.mts: ${error}`);
    process.exitCode = 1;
  }
} else {
  listen(8080);
}
