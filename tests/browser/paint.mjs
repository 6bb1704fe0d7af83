// When each page of control is first painted in headless Chromium, in milliseconds since it was asked for.
// Usage: node paint.mjs URL KEY CHROMIUM ROWS FILE   (FILE: where the figures go, as JSON)
import { writeFileSync } from "node:fs";
import { PAGES, launch, logInWith } from "./site.mjs";

const [url, key, executablePath, rows, file] = process.argv.slice(2);
const TIMES = 5;

const browser = await launch(executablePath);
const page = await browser.newPage({ viewport: { width: 1200, height: 900 } });
await logInWith(page, url, key, "/keys");
const found = {};
console.log(`| page | first visit, ms | median of the next ${TIMES}, ms | longest, ms |\n|---|---|---|---|`);
for (const [name, path] of Object.entries(PAGES)) {
  const painted = [];
  for (let n = 0; n <= TIMES; n += 1) {
    const answer = await page.goto(url + path);
    if (answer.status() !== 200) throw new Error(`${path}: ${answer.status()}`);
    // a paint is recorded a little after the page is loaded
    let entry;
    for (let wait = 0; !entry && wait < 100; wait += 1) {
      entry = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime);
      if (!entry) await new Promise((resolve) => setTimeout(resolve, 50));
    }
    if (!entry) throw new Error(`${path} was not painted`);
    painted.push(entry);
  }
  const [first, ...next] = painted;
  next.sort((a, b) => a - b);
  found[name] = { first, next };
  console.log(`| ${name} | ${first.toFixed(0)} | ${next[(TIMES - 1) / 2].toFixed(0)} | ${next[TIMES - 1].toFixed(0)} |`);
}
await browser.close();
writeFileSync(file, `${JSON.stringify({ rows: Number(rows), milliseconds: found }, null, 2)}\n`);
