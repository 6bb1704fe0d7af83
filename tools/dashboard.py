#!/usr/bin/env python3
"""Writes deploy/dashboard.json for Grafana, or checks it.

    dashboard.py              write it
    dashboard.py --check      fail if the file is another one
    dashboard.py --ask URL    ask the Prometheus at URL every panel's query; fail if an answer is empty
"""
import json
import pathlib
import sys
import urllib.parse
import urllib.request

FILE = pathlib.Path(__file__).parent.parent / "deploy/dashboard.json"
JOB = 'job=~"springtide.*"'


def rate(metric, by=""):
    return f"sum by ({by}) (rate({metric}{{{JOB}}}[$__rate_interval]))"


def quantile(q, metric, by=""):
    inner = ", ".join(filter(None, ["le", by]))
    return f"histogram_quantile({q}, sum by ({inner}) (rate({metric}_bucket{{{JOB}}}[$__rate_interval])))"


def gauge(metric, by="instance"):
    return f"max by ({by}) ({metric}{{{JOB}}})"


# (row, [(title, unit, {legend: query})])
ROWS = [
    ("Is it well?", [
        ("Roles that answer", "none", {"{{role}}": f'sum by (role) (up{{{JOB}}} * on (instance) group_left (role) '
                                                   f'group by (instance, role) (springtide_http_connections{{{JOB}}}))'}),
        ("Errors of requests", "reqps", {"{{role}} {{status}}": f'sum by (role, status) (rate(springtide_http_requests_total'
                                                                f'{{{JOB}, status=~"5..|429"}}[$__rate_interval])) '
                                                                f'or vector(0)'}),
        ("The log is behind the tables", "s", {"{{topic}}": gauge("springtide_ingest_lag_seconds", "topic")}),
        ("Age of the store's timestamp", "s", {"{{instance}}": gauge("springtide_store_statement_age_seconds")}),
    ]),
    ("Answers", [
        ("Requests", "reqps", {"{{role}}": rate("springtide_http_requests_total", "role")}),
        ("Time to the first token", "s", {"p50": quantile(0.5, "springtide_time_to_first_token_seconds"),
                                          "p95": quantile(0.95, "springtide_time_to_first_token_seconds")}),
        ("Sampled tokens", "none", {"{{instance}}": rate("springtide_sampled_tokens_total", "instance")}),
        ("Waiting and running choices", "none", {"waiting {{instance}}": gauge("springtide_queue_choices"),
                                                 "running {{instance}}": gauge("springtide_running_choices")}),
        ("The log's acknowledgement", "s", {"p95": quantile(0.95, "springtide_log_acknowledge_seconds")}),
        ("Resident versions", "none", {"{{instance}}": gauge("springtide_resident_versions")}),
    ]),
    ("Feedback", [
        ("Accepted events", "none", {"{{kind}}": rate("springtide_ingest_accepted_total", "kind")}),
        ("Records by outcome", "none", {"{{outcome}}": rate("springtide_ingest_records_total", "outcome")}),
        ("Closed trajectories", "none", {"{{outcome}}": rate("springtide_ingest_trajectories_total", "outcome")}),
        ("A batch of rows", "s", {"p95": quantile(0.95, "springtide_ingest_batch_seconds")}),
    ]),
    ("Learning", [
        ("Steps", "none", {"steps a minute": f"60 * {rate('springtide_train_steps_total')}"}),
        ("Trajectories that wait for a step", "none", {"{{instance}}": gauge("springtide_train_ready_trajectories")}),
        ("Mean reward of a cohort", "none", {"{{instance}}": gauge("springtide_train_reward_mean")}),
        ("Entropy", "none", {"nats": gauge("springtide_train_entropy_nats")}),
        ("Distance to the policy that sampled (KL)", "none", {"nats": gauge("springtide_train_kl_nats")}),
        ("Largest difference to our own engine", "none", {"nats": gauge("springtide_train_parity_difference_max_nats")}),
        ("Gradient norm", "none", {"{{instance}}": gauge("springtide_train_gradient_norm")}),
        ("A step", "s", {"p95": quantile(0.95, "springtide_train_step_seconds")}),
    ]),
    ("Versions", [
        ("Moves of aliases", "none", {"{{alias}}": f"60 * {rate('springtide_alias_moves_total', 'alias')}"}),
        ("Stages of a change of version", "s", {"{{stage}} p95": quantile(0.95, "springtide_swap_stage_seconds", "stage")}),
        ("Pause of the engine", "s", {"p95": quantile(0.95, "springtide_swap_pause_seconds")}),
        ("Downloaded bytes", "Bps", {"{{instance}}": rate("springtide_followed_bytes_total", "instance")}),
    ]),
]


def dashboard():
    panels, top = [], 0
    for row, of_row in ROWS:
        panels.append({"type": "row", "title": row, "id": len(panels) + 1, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        top += 1
        for index, (title, unit, queries) in enumerate(of_row):
            targets = [{"refId": chr(65 + i), "expr": query, "legendFormat": legend}
                       for i, (legend, query) in enumerate(queries.items())]
            panels.append({"type": "timeseries", "title": title, "id": len(panels) + 1, "targets": targets,
                           "datasource": {"type": "prometheus", "uid": "${datasource}"},
                           "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                           "gridPos": {"x": index % 4 * 6, "y": top + index // 4 * 7, "w": 6, "h": 7}})
        top += (len(of_row) + 3) // 4 * 7
    return {"title": "Springtide", "uid": "springtide", "schemaVersion": 39, "version": 1, "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"}, "tags": ["springtide"], "panels": panels,
            "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]}}


def ask(url):
    empty = 0
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            query = urllib.parse.urlencode({"query": target["expr"].replace("$__rate_interval", "1m")})
            with urllib.request.urlopen(f"{url}/api/v1/query?{query}") as answer:
                series = json.load(answer)["data"]["result"]
            values = [one["value"][1] for one in series if one["value"][1] != "NaN"]
            print(f"{len(values):3d} series  {panel['title']}: {target['legendFormat']}")
            empty += not values
    print(f"queries with an empty answer: {empty}")
    return empty


def main():
    text = json.dumps(dashboard(), indent=1) + "\n"
    match sys.argv[1:]:
        case []:
            FILE.write_text(text)
        case ["--check"]:
            sys.exit(f"{FILE} is not what tools/dashboard.py writes: run it" if FILE.read_text() != text else 0)
        case ["--ask", url]:
            sys.exit(ask(url) > 0)
        case _:
            sys.exit(__doc__)


main()
