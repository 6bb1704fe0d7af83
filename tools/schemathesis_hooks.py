"""Describes bodies and parameters that the OpenAPI documents of most roles leave open, so that
Schemathesis gets beyond their first check. Only requests are described: what a role may answer is
what its own document says. Used by tools/schemathesis.sh."""
import schemathesis

TEXT = {"type": "string", "maxLength": 200}
UUID = {"type": "string", "format": "uuid"}
COUNT = {"type": "integer", "minimum": 0}


def record(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def list_of(items, most=4):
    return {"type": "array", "items": items, "maxItems": most}


MODEL = {"enum": ["demo", "demo@learner", "demo@champion", "demo@base", "demo@none"]}
SAMPLING = dict(
    model=MODEL,
    n={"type": "integer", "minimum": 1, "maximum": 2},
    stop={"anyOf": [TEXT, list_of(TEXT)]},
    seed=COUNT,
    stream={"type": "boolean"},
    user=TEXT,
    session_id=TEXT,
    surface={"enum": ["completion", "rollout", "none"]},
    priority={"type": "integer", "minimum": 0, "maximum": 100},
    return_token_ids={"type": "boolean"},
    temperature={"type": "number", "minimum": 0, "maximum": 2},
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    logit_bias={"type": "object", "propertyNames": {"pattern": "^[0-9]{1,4}$"}, "additionalProperties": {"type": "number"}},
    metadata=record(purpose={"enum": ["production", "rollout", "evaluation"]}, run_id=UUID, task_id=TEXT, group_id=TEXT,
                    consent={"type": "boolean"}),
)
MESSAGE = record(["role", "content"], role={"enum": ["system", "user", "assistant", "tool"]}, content=TEXT)
GRADER = record(
    ["type", "input", "reference"],
    type={"enum": ["string_check", "text_similarity", "python"]},
    input={"anyOf": [TEXT, {"enum": ["{{ sample.output_text }}", "{{ item.answer", "{{ item.other }}"]}]},
    reference={"anyOf": [TEXT, {"enum": ["{{ item.answer }}"]}]},
    operation={"enum": ["eq", "ne", "like", "ilike"]},
    evaluation_metric={"enum": ["fuzzy_match", "bleu"]},
)
MULTI = record(
    ["type", "graders", "calculate_output"],
    type={"enum": ["multi"]},
    graders=record(a=GRADER, b=GRADER),
    calculate_output={"anyOf": [TEXT, {"enum": ["0.5 * a + 0.5 * b", "a / b", "a"]}]},
)
TASK = record(["prompt", "answer"], id=TEXT, prompt=TEXT, answer=TEXT)
BODIES = {
    "/v1/completions": record(
        ["model", "prompt"],
        prompt={"anyOf": [TEXT, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2047}, "maxItems": 64}]},
        max_tokens={"type": "integer", "minimum": 1, "maximum": 8},
        logprobs={"type": "integer", "minimum": 0, "maximum": 5},
        **SAMPLING,
    ),
    "/v1/chat/completions": record(
        ["model", "messages"], messages=list_of(MESSAGE), max_completion_tokens={"type": "integer", "minimum": 1, "maximum": 8}, **SAMPLING
    ),
    "/v1/responses": record(
        ["model", "input"],
        input={"anyOf": [TEXT, list_of(record(["role", "content"], role={"enum": ["user", "assistant", "developer"]}, content=TEXT))]},
        instructions=TEXT,
        max_output_tokens={"type": "integer", "minimum": 1, "maximum": 8},
        text=record(format={"enum": [{"type": "text"}, {"type": "json_object"}]}),
        tool_choice={"enum": ["auto", "none", "required"]},
    ),
    "/v1/messages": record(
        ["model", "messages", "max_tokens"],
        messages=list_of(record(["role", "content"], role={"enum": ["user", "assistant"]}, content=TEXT)),
        max_tokens={"type": "integer", "minimum": 1, "maximum": 8},
        system=TEXT,
        thinking=record(["type"], type={"enum": ["enabled", "adaptive", "disabled"]}),
    ),
    "/v1/messages/count_tokens": record(
        ["model", "messages"],
        messages=list_of(record(["role", "content"], role={"enum": ["user", "assistant"]}, content=TEXT)),
    ),
    "/v1/runs": record(
        ["kind"],
        kind={"enum": ["grpo", "sft", "evaluate", "export", "dpo", "kto", "ppo"]},
        dataset={"enum": ["accepted@1", "none@1", "none"]},
        batch_size=COUNT,
        weight_max={"type": "number"},
        tokens_per_step=COUNT,
        target={"enum": ["sampled", "demonstration", "typed"]},
        base={"enum": ["champion", "realtime", "none"]},
        beta={"type": "number"},
        margin={"type": "number"},
        threshold={"type": "number"},
        desirable_weight={"type": "number"},
        undesirable_weight={"type": "number"},
        pair_by={"enum": ["prompt", "group", "user"]},
        format={"enum": ["jsonl", "parquet", "csv"]},
        policy={"enum": ["demo", "none"]},
        base_version=COUNT,
        tasks=list_of(TASK),
        tasks_jsonl=TEXT,
        grader={"anyOf": [{"enum": ["exact_match", "prefix_match", "contains"]}, GRADER, MULTI]},
        advantage={"enum": ["dr_grpo", "grpo", "rloo"]},
        aggregation={"enum": ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]},
        loss=record(
            ["name"],
            name={"enum": ["reinforce_is", "ppo_clip", "gspo", "verdicts", "cross_entropy"]},
            cap={"type": "number"},
            low={"type": "number"},
            high={"type": "number"},
            dual={"type": "number"},
        ),
        schedule=record(
            starts_at=TEXT,
            window={"anyOf": [TEXT, {"enum": ["22:00-06:00 Europe/Berlin", "06:00-06:00 UTC"]}]},
            repeats={"anyOf": [TEXT, {"enum": ["0 3 * * * Europe/Berlin", "0 3 31 2 * UTC"]}]},
            priority={"type": "integer"},
        ),
        group_size=COUNT,
        tasks_per_step=COUNT,
        steps=COUNT,
        learning_rate={"type": "number"},
        max_tokens=COUNT,
        temperature={"type": "number"},
        seed=COUNT,
        lora=record(r=COUNT, lora_alpha={"type": "number"}, target_modules={"anyOf": [TEXT, list_of(TEXT)]}),
    ),
    "/v1/datasets": record(
        ["name"],
        name={"enum": ["accepted", "Accepted"]},
        query=record(
            tenants=list_of(TEXT),
            surfaces=list_of(TEXT),
            purposes=list_of(TEXT),
            version_min=COUNT,
            reward_min={"type": "number"},
            sampled_from=TEXT,
            split=record(["salt", "share"], salt=TEXT, share={"type": "number"}, rest={"type": "boolean"}),
            limit=COUNT,
        ),
    ),
    "/v1/releases": record(
        ["kind", "alias"], kind={"enum": ["promote", "rollback", "pin"]}, alias={"enum": ["learner", "champion", "base", "canary", "run-x", "A"]},
        version={"type": "integer"}, reason=TEXT,
    ),
    "/v1/experiment": record(
        ["arms"], salt=TEXT, replaces=UUID, reason=TEXT,
        arms=list_of(record(["alias", "weight"], alias={"enum": ["learner", "champion", "base", "none"]},
                            weight={"type": "number"}, explore={"type": "number"},
                            temperature_max={"type": "number"}, probability_min={"type": "number"})),
    ),
    "/v1/canaries": record(
        ["version"], version={"type": "integer"}, reason=TEXT,
        strategy=record(
            steps=list_of({"anyOf": [record(["setWeight"], setWeight={"type": "number"}), record(["pause"], pause=record(duration=TEXT))]}),
            judge=record(margin={"type": "number"}, effect={"type": "number"}, alpha={"type": "number"}, usersMin=COUNT),
            requiresApproval=COUNT,
        ),
    ),
    "/v1/canaries/{id}/{decision}": record(reason=TEXT),
    "/v1/replicas/{id}": record(
        ["cluster", "policy", "address", "epoch", "resident", "ready"],
        cluster=TEXT, policy=TEXT, address=TEXT, epoch={"type": "integer"}, ready={"type": "boolean"},
        resident=list_of(record(["version", "root", "aliases"], version={"type": "integer"}, root=TEXT, aliases=list_of(TEXT))),
    ),
    "/v1/swaps": record(
        ["replica", "policy", "version", "epoch", "fetch_ms", "verify_ms", "stage_ms", "pause_ms"],
        replica=TEXT, policy=TEXT, version={"type": "integer"}, epoch={"type": "integer"},
        fetch_ms={"type": "number"}, verify_ms={"type": "number"}, stage_ms={"type": "number"}, pause_ms={"type": "number"},
    ),
    "/v1/tide/{id}": record(
        ["policy", "process", "history_days", "minutes", "uses"],
        policy=TEXT, process=UUID, history_days={"type": "integer"}, minutes={"type": "array", "maxItems": 0},
        uses=list_of(record(
            ["engine", "day", "work", "run", "sampled", "read", "read_again", "thrown_away", "slot_seconds", "engine_seconds"],
            engine={"type": "integer"}, day={"type": "string", "format": "date"}, work={"enum": ["production", "rollout", "fun"]},
            run=UUID, sampled={"type": "integer"}, read={"type": "integer"}, read_again={"type": "integer"},
            thrown_away={"type": "integer"}, slot_seconds={"type": "number"}, engine_seconds={"type": "number"},
        )),
    ),
}
QUERIES = {
    "/v1/runs": dict(limit=COUNT, after=UUID, status=TEXT, kind=TEXT),
    "/v1/runs/{id}/events": dict(limit=COUNT, after=UUID),
    "/v1/runs/{id}/checkpoints": dict(limit=COUNT, after=COUNT),
    "/v1/runs/{id}/curve": dict(limit=COUNT, after=COUNT),
    "/v1/runs/compare": dict(ids=TEXT),
    "/v1/versions": dict(limit=COUNT, after=COUNT, line=TEXT),
    "/v1/releases": dict(limit={"type": "integer"}, alias=TEXT),
    "/v1/canaries": dict(limit={"type": "integer"}),
    "/v1/swaps": dict(limit={"type": "integer"}, replica=TEXT),
    "/v1/tide": dict(hours={"type": "integer"}),
    "/v1/ledger/cost": dict(days={"type": "integer"}, run=UUID),
    "/v1/ledger": dict(policy=TEXT, purpose=TEXT, since={"type": "string", "format": "date-time"}),
    "/v1/store": dict(prefix=TEXT),
}
PARAMETERS = {"id": {"anyOf": [UUID, TEXT]}, "serial": {"type": "integer"}, "decision": {"enum": ["approve", "hold", "resume", "promote", "abort", "rollback", "wait"]}}


@schemathesis.hook
def before_load_schema(_context, document):
    for path, item in document["paths"].items():
        for method, operation in item.items():
            # Ingest and the collector describe theirs.
            if method in ("post", "put") and operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema") == {"type": "object"}:
                operation["requestBody"]["content"]["application/json"]["schema"] = BODIES.get(path, {"type": "object"})
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path" and parameter["schema"] == {"type": "string"}:
                    parameter["schema"] = PARAMETERS.get(parameter["name"], TEXT)
            if method == "get" and path in QUERIES:
                named = [{"name": name, "in": "query", "schema": schema} for name, schema in QUERIES[path].items()]
                operation["parameters"] = operation.get("parameters", []) + named
