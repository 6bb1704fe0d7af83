// Logging in through a real OpenID Connect provider (oidc-provider), and tokens of it that are wrong in one thing.
// Usage: node oidc.mjs URL PROVIDER_PORT CHROMIUM
import assert from "node:assert/strict";
import { exportJWK, generateKeyPair, SignJWT, UnsecuredJWT } from "jose";
import Provider from "oidc-provider";
import { launch } from "./site.mjs";

const [url, port, chromium] = process.argv.slice(2);
const issuer = `http://127.0.0.1:${port}`;
const groups = { ada: ["springtide-release"], bob: ["others"] };
const ID_TOKEN_SECONDS = 8;
const LEEWAY_SECONDS = 30;
const seconds = (count) => new Promise((done) => setTimeout(done, count * 1000));

const key = async (kid) => {
  const pair = await generateKeyPair("RS256", { extractable: true });
  return { kid, secret: pair.privateKey, jwk: { ...(await exportJWK(pair.privateKey)), kid, alg: "RS256", use: "sig" } };
};

const serve = (...keys) => {
  const provider = new Provider(issuer, {
    jwks: { keys: keys.map((one) => one.jwk) },
    clients: [
      { client_id: "springtide-page", token_endpoint_auth_method: "none", redirect_uris: [`${url}/login/callback`],
        application_type: "native", grant_types: ["authorization_code"], response_types: ["code"] },
      { client_id: "ci", client_secret: "a-secret-of-the-test", grant_types: ["client_credentials"],
        redirect_uris: [], response_types: [] },
    ],
    claims: { openid: ["sub", "groups"], email: ["email"], profile: ["name"] },
    conformIdTokenClaims: false,
    ttl: { IdToken: ID_TOKEN_SECONDS, ClientCredentials: 600 },
    pkce: { required: () => true },
    features: {
      clientCredentials: { enabled: true },
      devInteractions: { enabled: true },
      resourceIndicators: {
        enabled: true,
        defaultResource: () => "urn:springtide",
        useGrantedResource: () => true,
        getResourceServerInfo: () => ({ scope: "", audience: "springtide", accessTokenTTL: 600, accessTokenFormat: "jwt" }),
      },
    },
    findAccount: async (_, id) =>
      groups[id] && { accountId: id, claims: async () => ({ sub: id, email: `${id}@example.com`, groups: groups[id] }) },
    extraTokenClaims: async (_, token) => (token.kind === "ClientCredentials" ? { groups: ["springtide-ci"] } : undefined),
  });
  return new Promise((done) => {
    const server = provider.listen(port, "127.0.0.1", () => done(server));
  });
};
const stop = (server) => new Promise((done) => { server.close(done); server.closeAllConnections(); });

const status = async (token, path = "/v1/versions") => {
  const answer = await fetch(url + path, { headers: { authorization: `Bearer ${token}` } });
  return answer.status;
};

const logIn = async (browser, name) => {
  const context = await browser.newContext();
  const page = await context.newPage();
  await page.goto(`${url}/fleet`);
  await page.click("text=Log in at 127.0.0.1");
  await page.fill("input[name=login]", name);
  await page.fill("input[name=password]", "any");
  await page.click("button[type=submit]");
  const consent = page.locator("button[type=submit]");
  await consent.click();
  await page.waitForURL((at) => at.origin === url);
  return page;
};

const [first, second] = [await key("first"), await key("second")];
let server = await serve(first);

// a machine
const credentials = Buffer.from("ci:a-secret-of-the-test").toString("base64");
const machine = await (await fetch(`${issuer}/token`, {
  method: "POST",
  headers: { authorization: `Basic ${credentials}`, "content-type": "application/x-www-form-urlencoded" },
  body: "grant_type=client_credentials",
})).json();
assert.equal(await status(machine.access_token), 200, "an access token of the provider");
assert.equal(await status(machine.access_token, "/v1/erasures"), 403, "it may read, and no more");

// what is wrong in one thing, signed with the provider's own key
const now = Math.floor(Date.now() / 1000);
const claims = { iss: issuer, aud: "springtide", sub: "ci", client_id: "ci", iat: now, exp: now + 600, groups: ["springtide-ci"] };
const sign = (more = {}, by = first, typ = "at+jwt") =>
  new SignJWT({ ...claims, ...more }).setProtectedHeader({ alg: "RS256", kid: by.kid, typ }).sign(by.secret);
assert.equal(await status(await sign()), 200, "the test signs as the provider does");
const forger = await key("first");
const wrong = {
  "another audience": await sign({ aud: "other" }),
  "another issuer": await sign({ iss: "http://127.0.0.1:1" }),
  expired: await sign({ iat: now - 900, exp: now - 60 }),
  "not yet valid": await sign({ nbf: now + 300 }),
  "an ID token": await sign({ aud: "springtide-page" }, first, "JWT"),
  forged: await sign({}, forger),
  "of an unknown key": await sign({}, second),
  unsigned: new UnsecuredJWT(claims).encode(),
  "other claims": machine.access_token.replace(/\.[^.]+\./, `.${Buffer.from(JSON.stringify(claims)).toString("base64url")}.`),
};
for (const [what, token] of Object.entries(wrong)) assert.equal(await status(token), 401, what);
assert.equal(await status(await sign({ groups: ["others"] })), 403, "in no group");

// keys that are rotated
await stop(server);
server = await serve(second, first);
await seconds(11);
assert.equal(await status(await sign({}, second)), 200, "a new key");
assert.equal(await status(await sign()), 200, "the old key, which is still there");

// people
const browser = await launch(chromium);
const page = await logIn(browser, "ada");
await page.waitForURL(`${url}/fleet`);
const loggedInAt = Date.now();
assert.match(await page.content(), /ada@example\.com \(ada\)/, "the page says who looks");
const kept = (await page.context().cookies(url)).find((cookie) => cookie.name === "springtide_key");
assert.ok(kept.httpOnly && kept.sameSite === "Strict");
assert.equal(await status(kept.value), 401, "an ID token is no bearer token");
const stranger = await logIn(browser, "bob");
assert.match(await stranger.content(), /bob@example\.com \(bob\) is in no group/);
await stranger.goto(`${url}/fleet`);
assert.equal(new URL(stranger.url()).pathname, "/login");
// a code is of the browser that began
const other = await (await browser.newContext()).newPage();
const answer = await other.goto(`${url}/login/callback?code=x&state=y`);
assert.equal(answer.status(), 400);
// who leaves the group is out when the token expires: the provider is asked again by itself
groups.ada = ["others"];
await page.goto(`${url}/fleet`);
assert.equal(new URL(page.url()).pathname, "/fleet", "until then");
await seconds(ID_TOKEN_SECONDS + LEEWAY_SECONDS + 2 - (Date.now() - loggedInAt) / 1000);
await page.goto(`${url}/fleet`);
assert.equal(new URL(page.url()).origin, issuer);
await page.click("button[type=submit]"); // the provider asks for consent at each login of a client without TLS
await page.waitForURL((at) => at.origin === url);
assert.match(await page.content(), /ada@example\.com \(ada\) is in no group/);
console.log(`oidc: ${Object.keys(wrong).length + 1} wrong tokens refused, 2 people, keys rotated`);
await browser.close();
await stop(server);
process.exit(0);
