// Looks at every page of control in headless Chromium: axe finds nothing serious, nothing is wider than a phone, everything is
// reached by keyboard, both color schemes work, the page refreshes itself, and an action asks before it is done.
// Usage: node pages.mjs URL KEY TEXTS_KEY CHROMIUM FOLDER   (TEXTS_KEY: with the scope texts; screenshots go into FOLDER; '-'
// takes none)
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { CANARY, PAGES, launch, logInWith } from "./site.mjs";

const [url, key, textsKey, executablePath, folder] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
// Those in the documentation: name, page, phone or desktop, color scheme.
const SHOTS = [
  ["now", "now", "desktop", "light"],
  ["now-phone", "now", "phone", "dark"],
  ["canary", "canary", "desktop", "light"],
  ["canary-phone", "canary", "phone", "light"],
  ["learning", "learning", "desktop", "dark"],
  ["versions", "versions", "desktop", "light"],
];
const SIZES = { desktop: { width: 1200, height: 900 }, phone: { width: 360, height: 740 } };

const browser = await launch(executablePath);
const results = [];
const check = async (what, run) => {
  try {
    await run();
    results.push([true, what]);
  } catch (error) {
    results.push([false, `${what}: ${error.message}`]);
  }
};

// Which of a page's requests went elsewhere: none may.
const foreign = [];
const faults = [];
const open = async (options) => {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("data:")) foreign.push(request.url());
  });
  page.on("pageerror", (error) => faults.push(error.message));
  page.on("console", (message) => {
    if (message.type() === "error" && !message.text().includes("401")) faults.push(message.text());
  });
  return page;
};
const logIn = (page, next = "/", as = key) => logInWith(page, url, as, next);
// Asks again until it is so. (Playwright's own way needs `eval`, which the policy of the page forbids.)
const until = async (page, holds, seconds = 20) => {
  for (const end = Date.now() + 1000 * seconds; Date.now() < end; ) {
    // a page that is being reloaded cannot be asked
    if (await page.evaluate(holds).catch(() => false)) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`it was not so within ${seconds} s: ${holds}`);
};
const serious = async (page) => {
  // the policy of the page forbids scripts that stand in it, so axe comes over the debugger
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.map((node) => node.target.join(" ")).slice(0, 3).join(", ")}`);
};

const looksRight = async (page, colorScheme) => {
  assert.deepEqual(await serious(page), [], "axe");
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  assert.ok(wide <= 0, `${wide} pixels wider than the screen`);
  const background = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = background.match(/\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) > 384;
  assert.equal(light, colorScheme === "light", background);
};
// Tab reaches everything, and the focus can be seen.
const isReachedByKeyboard = async (page) => {
  const all = await page.evaluate(() => {
    const reachable = document.querySelectorAll("a[href], button, input:not([type=hidden]), summary, [tabindex='0']");
    const seen = [...reachable].filter((one) => one.checkVisibility());
    seen.forEach((one, nth) => (one.dataset.nth = String(nth)));
    return seen.length;
  });
  const reached = new Set();
  for (let pressed = 0; pressed < all + 5; pressed += 1) {
    await page.keyboard.press("Tab");
    const [nth, visible] = await page.evaluate(() => {
      const one = document.activeElement;
      const { outlineStyle } = getComputedStyle(one);
      return [one.dataset.nth, outlineStyle !== "none"];
    });
    if (nth === undefined) continue;
    assert.ok(visible, `the focus on ${nth} cannot be seen`);
    reached.add(nth);
  }
  assert.equal(reached.size, all, `${reached.size} of ${all} were reached`);
};

// --- logging in ---
{
  const page = await open({ viewport: SIZES.phone });
  await check("a page without a key leads to the form, and from there back", async () => {
    await page.goto(`${url}/releases`);
    assert.equal(new URL(page.url()).pathname, "/login");
    assert.deepEqual(await serious(page), []);
    await page.fill("#key", "spring_wrong");
    await page.keyboard.press("Enter");
    await page.waitForSelector("[role=alert]");
    await page.fill("#key", key);
    await page.keyboard.press("Enter");
    await page.waitForURL(`${url}/releases`);
  });
  await check("scripts cannot read the key, and it is in no address", async () => {
    assert.equal(await page.evaluate(() => document.cookie), "");
    assert.ok(!page.url().includes(key));
  });
  await check("a person can log out", async () => {
    await page.click("text=Log out");
    await page.waitForURL(`${url}/login`);
    await page.goto(`${url}/`);
    assert.equal(new URL(page.url()).pathname, "/login");
  });
  await page.context().close();
}

// --- every page ---
for (const size of Object.keys(SIZES)) {
  for (const colorScheme of ["light", "dark"]) {
    const page = await open({ viewport: SIZES[size], colorScheme, hasTouch: size === "phone" });
    await logIn(page);
    for (const [name, path] of Object.entries(PAGES)) {
      await check(`${name}, ${size}, ${colorScheme}`, async () => {
        const answer = await page.goto(url + path);
        assert.equal(answer.status(), 200);
        await looksRight(page, colorScheme);
      });
    }
    if (folder !== "-") {
      for (const [shot, name, of, scheme] of SHOTS) {
        if (of !== size || scheme !== colorScheme) continue;
        await page.goto(url + PAGES[name]);
        await page.waitForTimeout(400);
        // a picture is to be smaller than 150 kB
        const height = size === "phone" ? 1300 : name === "versions" ? 900 : 1150;
        await page.setViewportSize({ ...SIZES[size], height });
        await page.screenshot({ path: `${folder}/page-${shot}.png` });
        await page.setViewportSize(SIZES[size]);
      }
    }
    await page.context().close();
  }
}

// --- by keyboard ---
{
  const page = await open({ viewport: SIZES.desktop });
  // what is counted here must not be replaced meanwhile
  await page.addInitScript(() => delete window.EventSource);
  await logIn(page);
  for (const [name, path] of Object.entries(PAGES)) {
    await check(`${name} by keyboard`, async () => {
      await page.goto(url + path);
      await isReachedByKeyboard(page);
    });
  }
  await check("the skip link leads to the content", async () => {
    await page.goto(url);
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.id), "main");
  });
  await page.context().close();
}

// --- texts ---
for (const size of Object.keys(SIZES)) {
  for (const colorScheme of ["light", "dark"]) {
    const page = await open({ viewport: SIZES[size], colorScheme, hasTouch: size === "phone" });
    await logIn(page, "/trajectories", textsKey);
    await check(`texts, ${size}, ${colorScheme}`, async () => {
      await page.goto(`${url}/trajectories?arm=base`);
      await page.click("main td a[href^='/trajectories/']");
      await page.waitForURL(/\/trajectories\/[0-9a-f-]{36}$/);
      await looksRight(page, colorScheme);
      const answer = page.url();
      await page.focus("#reason");
      await page.keyboard.press("Enter");
      assert.equal(page.url(), answer, "it was sent without a reason");
      await page.keyboard.type("to compare two answers");
      await page.keyboard.press("Enter");
      await page.waitForURL(`${answer}/texts`);
      await looksRight(page, colorScheme);
      const texts = await page.textContent("#texts");
      for (const part of ["pub fn len(&self) -> <|cut|>", "usize {", "u32 {"]) assert.ok(texts.includes(part), `${part}: ${texts}`);
      const boxes = await page.evaluate(() =>
        [...document.querySelectorAll("#texts .beside > .card")].map((one) => {
          const { top, bottom, left, right } = one.getBoundingClientRect();
          return { top, bottom, left, right };
        }),
      );
      assert.equal(boxes.length, 2);
      const [one, other] = boxes;
      const placed = size === "phone" ? one.bottom <= other.top : one.top === other.top && one.right <= other.left;
      assert.ok(placed, JSON.stringify(boxes));
      if (size === "desktop" && colorScheme === "light") await isReachedByKeyboard(page);
    });
    await page.context().close();
  }
}

// --- live, and actions ---
{
  const page = await open({ viewport: SIZES.phone });
  await logIn(page, `/releases/${CANARY}`);
  await check("the page says that it is live", async () => {
    await until(page, () => document.getElementById("live-state").textContent === "live");
  });
  await check("an action says what it does, asks, and can be left", async () => {
    await page.focus("[data-dialog=decide-resume]");
    await page.keyboard.press("Enter");
    await page.waitForSelector("dialog[open]");
    assert.deepEqual(await serious(page), [], "axe");
    assert.match(await page.textContent("dialog[open]"), /It goes on with the step where it was/);
    await page.keyboard.press("Escape");
    assert.equal(await page.locator("dialog[open]").count(), 0);
    assert.equal(await page.textContent("#state .state"), "held");
  });
  await check("an action without a reason is not sent", async () => {
    await page.click("[data-dialog=decide-resume]");
    await page.click("dialog[open] form button:not([type=button])");
    assert.equal(await page.locator("dialog[open]").count(), 1);
    await page.keyboard.press("Escape");
  });
  await check("another page shows it without a reload when somebody has decided", async () => {
    const other = await page.context().newPage();
    await other.goto(`${url}/releases/${CANARY}`);
    await page.click("[data-dialog=decide-resume]");
    await page.fill("dialog[open] input[name=reason]", "the day shift is here");
    await page.click("dialog[open] form button:not([type=button])");
    for (const one of [page, other]) {
      await until(one, () => document.querySelector("#decisions")?.textContent.includes("the day shift is here"));
    }
    await other.close();
  });
  await check("what the API refuses is shown in the dialog", async () => {
    await page.goto(url);
    await page.click("[data-dialog=rollback]");
    await page.fill("dialog[open] input[name=version]", "4000");
    await page.fill("dialog[open] input[name=reason]", "a version that there is not");
    await page.click("dialog[open] form button:not([type=button])");
    await until(page, () => document.querySelector("dialog[open] .failed").textContent.includes("Not done"));
    assert.match(await page.textContent("dialog[open] .failed"), /no version 4000/);
  });
  await page.context().close();
}

// --- without scripts ---
{
  const page = await open({ viewport: SIZES.desktop, javaScriptEnabled: false });
  await logIn(page);
  await check("without scripts everything is shown", async () => {
    await page.goto(`${url}/releases/${CANARY}`);
    assert.match(await page.textContent("main"), /confidence sequence/);
    assert.match(await page.textContent("main"), /springtide canary/);
  });
  await page.context().close();
}

await check("nothing was loaded from elsewhere", async () => assert.deepEqual(foreign, []));
await check("no script failed, and nothing was against the page's policy", async () =>
  // what the API refused on purpose
  assert.deepEqual(faults.filter((fault) => !fault.includes("404")), []));
await browser.close();
for (const [passed, what] of results) if (!passed) console.log(`FAILED  ${what}`);
const failed = results.filter(([passed]) => !passed).length;
console.log(`${results.length - failed} of ${results.length} checks passed`);
process.exit(failed ? 1 : 0);
