// The pages of control, and how to get to them.
import { chromium } from "playwright-core";

export const CANARY = "01990000-0000-7000-8000-0000000000c2";
export const PAGES = {
  now: "/",
  releases: "/releases",
  canary: `/releases/${CANARY}`,
  versions: "/versions",
  version: "/versions/41",
  learning: "/learning",
  trajectories: "/trajectories",
  runs: "/runs",
  tide: "/tide",
  fleet: "/fleet",
  feedback: "/feedback",
  ledger: "/ledger",
  keys: "/keys",
};

export const launch = (executablePath) =>
  chromium.launch({
    executablePath,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });

export const logInWith = async (page, url, key, next) => {
  await page.goto(url + next);
  if (new URL(page.url()).pathname !== "/login") return;
  await page.fill("#key", key);
  await page.keyboard.press("Enter");
  await page.waitForURL((at) => at.pathname !== "/login");
};
