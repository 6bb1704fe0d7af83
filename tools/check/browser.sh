# Every page of control in headless Chromium: by keyboard, phone size, dark, axe; then logins at a real OpenID Connect
# provider, and wrong tokens of it. npm, 25 MB; needs Node.js 20.
# SHOTS=docs/images takes screenshots
need stack
packages chromium curl node npm
# shellcheck disable=SC2086 # no argument if there is no folder
on_stack tools/browser-test.sh "$springtide" "$(psql)" ${SHOTS:-}
