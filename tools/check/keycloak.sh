# Logins and tokens of a real Keycloak: wrong ones, new keys of the realm, a person who leaves the group. Downloads it,
# 165 MB; needs Java 17.
need stack
packages curl unzip
version=26.5.6 sha256=490189d9dff05272432d51f71a069462eeca97f2920a694d539a1e6c26a5a347
folder=.stack/keycloak-$version
if [ ! -d "$folder" ]; then
  zip=$(mktemp)
  curl --fail --silent --show-error --location --output "$zip" \
    "https://repo1.maven.org/maven2/org/keycloak/keycloak-quarkus-dist/$version/keycloak-quarkus-dist-$version.zip"
  echo "$sha256  $zip" | sha256sum --check --quiet
  unzip -q "$zip" -d .stack
  rm "$zip"
fi
on_stack python3 tools/keycloak.py --springtide "$springtide" --keycloak "$folder"
