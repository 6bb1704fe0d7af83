# When each page of control is first painted with many answers in the tables, in headless Chromium. 10⁷: 20 minutes,
# more than 9 GB of disk. ROWS=10000000
need stack
packages chromium node npm
export ROWS=${ROWS:-10000000} PAINT_JSON=$target/bench/page.json
on_stack tools/browser-test.sh "$springtide" "$(psql)"
