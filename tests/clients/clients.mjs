// Well-known clients for Node against a running Springtide: whole and streamed answers, and errors.
//
//     node clients.mjs URL MODEL
//
// Prints one line per client and check; exits with 1 if one failed.

import assert from "node:assert";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Which color has the sky?" }];
const ends = ["stop", "length"];

function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  return {
    async completion() {
      const answer = await client.completions.create({ model, prompt: "def add(a, b):", max_tokens: 8 });
      assert(ends.includes(answer.choices[0].finish_reason));
    },
    async chat() {
      const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
      assert(ends.includes(answer.choices[0].finish_reason));
    },
    async chatStream() {
      const stream = client.chat.completions.stream({ model, messages, max_tokens: 8 });
      const answer = await stream.finalChatCompletion();
      assert(ends.includes(answer.choices[0].finish_reason));
    },
    async leavesInTheMiddle() {
      const stream = await client.chat.completions.create({ model, messages, max_tokens: 100, stream: true });
      for await (const _ of stream) break;
    },
    async unknownModel() {
      await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
    },
  };
}

function ai() {
  const springtide = createOpenAICompatible({ name: "springtide", baseURL: `${url}/v1`, includeUsage: true });
  return {
    async generateText() {
      const answer = await generateText({ model: springtide(model), messages, maxOutputTokens: 8 });
      assert(ends.includes(answer.finishReason) && answer.usage.outputTokens <= 8);
    },
    async streamText() {
      const answer = streamText({ model: springtide(model), messages, maxOutputTokens: 8 });
      for await (const _ of answer.textStream);
      assert(ends.includes(await answer.finishReason));
      assert((await answer.usage).outputTokens <= 8);
    },
    async completionModel() {
      const completion = springtide.completionModel(model);
      const answer = await generateText({ model: completion, prompt: "def add(a, b):", maxOutputTokens: 8 });
      assert(ends.includes(answer.finishReason));
    },
    async anthropicMessage() {
      const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
      const answer = streamText({ model: anthropic(model), messages, maxOutputTokens: 8 });
      for await (const _ of answer.textStream);
      assert(ends.includes(await answer.finishReason));
      assert((await answer.usage).outputTokens <= 8);
    },
    async unknownModel() {
      const asked = generateText({ model: springtide("nobody"), messages, maxRetries: 0 });
      await assert.rejects(asked, /nobody/);
    },
  };
}

const versions = JSON.parse(readFileSync("package.json")).dependencies;
let failed = false;
for (const [name, checks] of Object.entries({ openai: openai(), ai: ai() })) {
  for (const [check, run] of Object.entries(checks)) {
    let outcome = "ok";
    try {
      await run();
    } catch (error) {
      failed = true;
      outcome = `FAILED: ${error}`;
    }
    console.log(`${name} (Node) ${versions[name]} ${check}: ${outcome}`);
  }
}
process.exit(failed ? 1 : 0);
