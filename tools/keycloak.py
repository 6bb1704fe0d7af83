"""Logs in through a real Keycloak. `make check NAME=keycloak` runs it, with an empty Postgres and Kafka.

A machine's token, tokens that are wrong in one thing, new keys of the realm, a person at the page, and a person who leaves
the group.
"""

import argparse
import base64
import html
import http.cookiejar
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

REALM = "acme"
SECRET = "a-secret-of-the-test"
PERSON, PASSWORD = "ada", "a-password-of-the-test"
#: Of access and ID tokens, and by how much clocks may differ.
TOKEN_SECONDS, LEEWAY_SECONDS = 20, 30
#: Keys of the provider are read again at most this often when a token names a new one.
KEYS_SECONDS = 11
#: Keycloak prepares itself at its first start.
WAIT_SECONDS = 400.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("springtide", "keycloak"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: exit(1))
    ports = free_ports(2)
    provider, page = (f"http://127.0.0.1:{port}" for port in ports)
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        try:
            processes.append(start_keycloak(args.keycloak.resolve(), work, ports[0], page))
            wait("Keycloak answers", lambda: status(f"{provider}/realms/{REALM}") == 200, processes, work)
            processes.append(start_control(args.springtide.resolve(), work, ports[1], provider, page))
            wait("control answers", lambda: status(f"{page}/health") == 200, processes, work)
            check(provider, page)
        finally:
            for process in reversed(processes):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def realm(page: str) -> dict:
    """What an administrator of Keycloak sets up for Springtide, and clients that lack a part of it."""
    groups = {"claim.name": "groups", "full.path": "false", "id.token.claim": "true", "access.token.claim": "true"}
    audience = {"included.custom.audience": "springtide", "access.token.claim": "true"}
    email = {"user.attribute": "email", "claim.name": "email", "id.token.claim": "true", "jsonType.label": "String"}
    # a realm that names its scopes has no others: the last three are what a new realm has
    scopes = {
        "groups": ("oidc-group-membership-mapper", groups),
        "springtide": ("oidc-audience-mapper", audience),
        "basic": ("oidc-sub-mapper", {"access.token.claim": "true"}),
        "email": ("oidc-usermodel-attribute-mapper", email),
        "profile": ("oidc-usermodel-attribute-mapper", email | {"user.attribute": "username", "claim.name": "preferred_username"}),
    }

    def machine(name: str, is_rfc9068: bool, scopes: list[str]) -> dict:
        return {
            "clientId": name, "secret": SECRET, "serviceAccountsEnabled": True, "standardFlowEnabled": False,
            "attributes": {"access.token.header.type.rfc9068": str(is_rfc9068).lower()},
            "defaultClientScopes": ["basic", *scopes],
        }

    machines = [
        machine("ci", True, ["groups", "springtide"]),
        machine("old-type", False, ["groups", "springtide"]),
        machine("other-audience", True, ["groups"]),
        machine("no-groups", True, ["springtide"]),
    ]
    person = {
        "username": PERSON, "enabled": True, "email": "ada@example.com", "emailVerified": True, "firstName": "A",
        "lastName": "L", "credentials": [{"type": "password", "value": PASSWORD}], "groups": ["/release"],
    }
    accounts = [
        {"username": f"service-account-{one['clientId']}", "enabled": True, "serviceAccountClientId": one["clientId"], "groups": ["/ci"]}
        for one in machines
    ]
    return {
        "realm": REALM, "enabled": True, "sslRequired": "none", "accessTokenLifespan": TOKEN_SECONDS,
        "groups": [{"name": "release"}, {"name": "ci"}],
        "clientScopes": [
            {"name": name, "protocol": "openid-connect",
             "protocolMappers": [{"name": name, "protocol": "openid-connect", "protocolMapper": mapper, "config": config}]}
            for name, (mapper, config) in scopes.items()
        ],
        "users": [person, *accounts],
        "clients": [
            {"clientId": "springtide-page", "publicClient": True, "redirectUris": [f"{page}/login/callback"],
             "attributes": {"pkce.code.challenge.method": "S256"}, "defaultClientScopes": ["basic", "groups", "email", "profile"]},
            *machines,
        ],
    }  # fmt: skip


def start_keycloak(installation: pathlib.Path, work: pathlib.Path, port: int, page: str) -> subprocess.Popen:
    place = work / "keycloak"
    shutil.copytree(installation, place)
    (place / "data/import").mkdir(parents=True)
    (place / "data/import/realm.json").write_text(json.dumps(realm(page)))
    environment = os.environ | {"KC_BOOTSTRAP_ADMIN_USERNAME": "admin", "KC_BOOTSTRAP_ADMIN_PASSWORD": SECRET}
    command = [place / "bin/kc.sh", "start-dev", f"--http-port={port}", "--http-host=127.0.0.1", "--import-realm"]
    return start(command, work / "keycloak.log", environment)


def start_control(springtide: pathlib.Path, work: pathlib.Path, port: int, provider: str, page: str) -> subprocess.Popen:
    config = work / "springtide.toml"
    config.write_text(f"""
state_dir = "{work}/s"
listen.control = "127.0.0.1:{port}"
postgres.url = "{os.environ["SPRINGTIDE_TEST_POSTGRES"]}"
kafka.brokers = "{os.environ["SPRINGTIDE_TEST_KAFKA"]}"
kafka.librdkafka_file = "{os.environ["SPRINGTIDE_TEST_KAFKA_FILE"]}"
kafka.topic_prefix = "keycloak"
auth.required = true
serve.api_key = "unused"
trainer.api_key = "unused"
[auth.oidc]
issuer = "{provider}/realms/{REALM}"
redirect_url = "{page}/login/callback"
groups = [{{ name = "release", role = "release" }}, {{ name = "ci", scopes = ["read"] }}]
""")
    subprocess.run([springtide, "--config", config, "migrate"], check=True, stdout=subprocess.DEVNULL)
    return start([springtide, "--config", config, "control"], work / "control.log", None)


def check(provider: str, page: str) -> None:
    def token(client: str) -> str:
        grant = {"grant_type": "client_credentials", "client_id": client, "client_secret": SECRET}
        return post(f"{provider}/realms/{REALM}/protocol/openid-connect/token", grant)["access_token"]

    def answer(token: str, path: str = "/v1/versions") -> int:
        return status(page + path, token)

    machine = token("ci")
    expect("a machine's token", answer(machine), 200)
    expect("what its scopes do not have", answer(machine, "/v1/erasures"), 403)
    expect("a token that is not of RFC 9068", answer(token("old-type")), 401)
    expect("a token for another audience", answer(token("other-audience")), 401)
    expect("a token without groups", answer(token("no-groups")), 403)
    expect("a changed token", answer(changed(machine)), 401)

    admin = {"grant_type": "password", "client_id": "admin-cli", "username": "admin", "password": SECRET}

    def manage(method: str, path: str, body: dict | None = None) -> object:
        by = post(f"{provider}/realms/master/protocol/openid-connect/token", admin)["access_token"]
        return send(method, f"{provider}/admin/realms/{REALM}{path}", body, by)

    key = {"name": "new", "providerId": "rsa-generated", "providerType": "org.keycloak.keys.KeyProvider", "config": {"priority": ["1000"]}}
    before = header(machine)["kid"]
    manage("POST", "/components", key)
    time.sleep(KEYS_SECONDS)
    newer = token("ci")
    assert header(newer)["kid"] != before, "Keycloak signs with the new key"
    expect("a token of a new key", answer(newer), 200)
    time.sleep(TOKEN_SECONDS + LEEWAY_SECONDS + 2)
    expect("an expired token", answer(newer), 401)

    opener, text = log_in(page)
    expect("a person at the page", is_in(text), True)
    (person,) = manage("GET", f"/users?username={PERSON}&exact=true")
    (group,) = manage("GET", f"/users/{person['id']}/groups")
    manage("DELETE", f"/users/{person['id']}/groups/{group['id']}")
    time.sleep(TOKEN_SECONDS + LEEWAY_SECONDS + 2)
    # the browser goes to Keycloak, which still knows the person, and comes back with a token without the group
    text = read(opener, f"{page}/fleet")
    expect("a person who left the group", is_in(text), False)
    assert "is in no group" in text, text


def is_in(text: str) -> bool:
    return "ada@example.com" in text and "is in no group" not in text


def log_in(page: str) -> tuple[urllib.request.OpenerDirector, str]:
    """As a browser would. Returns it, and the page that it sees."""
    # the cookies are for 127.0.0.1, whatever the port; those of Keycloak are marked secure, which a browser accepts there
    jar = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(secure_protocols=("https", "http")))
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.addheaders = [("accept", "text/html")]
    form = read(opener, f"{page}/login/provider?next=/fleet")
    action = re.search(r'action="([^"]+)"', form)
    assert action, f"Keycloak shows no form: {form}"
    answers = urllib.parse.urlencode({"username": PERSON, "password": PASSWORD, "credentialId": ""}).encode()
    read(opener, html.unescape(action.group(1)), answers)
    return opener, read(opener, f"{page}/fleet")


def read(opener: urllib.request.OpenerDirector, url: str, form: bytes | None = None) -> str:
    try:
        return opener.open(url, form, timeout=30).read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


def expect(what: str, found: object, wanted: object) -> None:
    assert found == wanted, f"{what}: {found}, not {wanted}"
    print(f"{what}: {found}", flush=True)


def header(token: str) -> dict:
    part = token.split(".")[0]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def changed(token: str) -> str:
    """With other claims and the same signature."""
    head, claims, signature = token.split(".")
    read = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    more = json.dumps(read | {"groups": ["release"]}).encode()
    return ".".join((head, base64.urlsafe_b64encode(more).decode().rstrip("="), signature))


def post(url: str, form: dict) -> dict:
    with urllib.request.urlopen(url, urllib.parse.urlencode(form).encode(), timeout=30) as answer:
        return json.load(answer)


def send(method: str, url: str, body: dict | None, token: str) -> object:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def status(url: str, token: str | None = None) -> int:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start(command: list, log: pathlib.Path, environment: dict | None) -> subprocess.Popen:
    with log.open("w") as out:
        return subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, env=environment, start_new_session=True)


def wait(what: str, condition, processes: list, work: pathlib.Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            logs = [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in work.glob("*.log")]
            raise SystemExit(f"not within {WAIT_SECONDS} s: {what}\n" + "\n".join(logs))
        time.sleep(0.3)


if __name__ == "__main__":
    main()
