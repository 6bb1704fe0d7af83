# The alerts of deploy/alerts.yml, each on series that call for it and on others. Downloads Debian's promtool, 25 MB.
promtool=.stack/prometheus/usr/bin/promtool
[ -x "$promtool" ] || (mkdir -p .stack && cd .stack && apt-get download prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb)
"$promtool" check rules deploy/alerts.yml
"$promtool" test rules deploy/alerts_test.yml
