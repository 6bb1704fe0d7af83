//! Whether an API still has what it had.

use std::collections::BTreeSet;

use serde_json::{Value, json};

/// How deep schemas are compared. They may contain themselves.
const DEPTH_MAX: usize = 12;

/// Everything that was there before is there now.
pub fn within(before: &Value, now: &Value, what: &str) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            for (name, value) in before {
                let found = now.get(name).unwrap_or_else(|| panic!("{what}: {name} is gone"));
                within(value, found, &format!("{what}.{name}"));
            }
        }
        (Value::Array(before), Value::Array(now)) => {
            assert_eq!(before.len(), now.len(), "{what}: {before:?} {now:?}");
            for (nth, (before, now)) in before.iter().zip(now).enumerate() {
                within(before, now, &format!("{what}[{nth}]"));
            }
        }
        _ => assert_eq!(before, now, "{what}"),
    }
}

/// Fails if a client of the API `before` cannot use the one `now`. Both are OpenAPI documents.
pub fn check(before: &Value, now: &Value, role: &str) {
    let broken = broken(before, now);
    assert!(
        broken.is_empty(),
        "{role} breaks its older clients:\n{}",
        broken.join("\n")
    );
}

fn broken(before: &Value, now: &Value) -> Vec<String> {
    let mut comparison = Comparison {
        before,
        now,
        broken: Vec::new(),
    };
    assert!(before["paths"].is_object(), "it was no OpenAPI document");
    for (path, item) in entries(&before["paths"]) {
        for (method, operation) in entries(item) {
            let what = format!("{method} {path}");
            match now["paths"].get(path).and_then(|item| item.get(method)) {
                Some(found) => comparison.operation(operation, found, &what),
                None => comparison.broken.push(format!("{what} is gone")),
            }
        }
    }
    comparison.broken
}

fn entries(object: &Value) -> impl Iterator<Item = (&String, &Value)> {
    object.as_object().into_iter().flatten()
}

fn names(list: &Value) -> BTreeSet<String> {
    let list = list.as_array().into_iter().flatten();
    list.map(|name| name.as_str().map_or_else(|| name.to_string(), str::to_owned))
        .collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Sent {
    ByClients,
    ByUs,
}

struct Comparison<'a> {
    before: &'a Value,
    now: &'a Value,
    broken: Vec<String>,
}

impl Comparison<'_> {
    fn operation(&mut self, before: &Value, now: &Value, what: &str) {
        let parameter = |parameter: &Value| (parameter["name"].clone(), parameter["in"].clone());
        let list = |operation: &Value| operation["parameters"].as_array().cloned().unwrap_or_default();
        for one in list(now) {
            let asked = |old: &Value| parameter(old) == parameter(&one) && old["required"] == true;
            if one["required"] == true && !list(before).iter().any(asked) {
                self.broken
                    .push(format!("{what} asks for the parameter {}", one["name"]));
            }
        }
        for one in list(before) {
            if !list(now).iter().any(|new| parameter(new) == parameter(&one)) {
                self.broken.push(format!("{what} has no parameter {}", one["name"]));
            }
        }
        let body = |operation: &Value| operation["requestBody"]["content"]["application/json"]["schema"].clone();
        self.schema(&body(before), &body(now), Sent::ByClients, what, 0);
        for (status, response) in entries(&before["responses"]).filter(|(status, _)| status.starts_with('2')) {
            let found = &now["responses"][status];
            if found.is_null() {
                self.broken.push(format!("{what} does not answer {status}"));
            }
            let schema = |response: &Value| response["content"]["application/json"]["schema"].clone();
            self.schema(
                &schema(response),
                &schema(found),
                Sent::ByUs,
                &format!("{what} {status}"),
                0,
            );
        }
    }

    fn schema(&mut self, before: &Value, now: &Value, sent: Sent, what: &str, depth: usize) {
        let (before, now) = (resolved(self.before, before), resolved(self.now, now));
        if depth > DEPTH_MAX || before.is_null() {
            return;
        }
        let kinds = |schema: &Value| match &schema["type"] {
            Value::Array(_) => names(&schema["type"]),
            kind => kind.as_str().map(str::to_owned).into_iter().collect(),
        };
        let (old, new) = (kinds(&before), kinds(&now));
        let (narrow, wide) = match sent {
            Sent::ByClients => (&old, &new),
            Sent::ByUs => (&new, &old),
        };
        if !old.is_empty() && !narrow.is_subset(wide) {
            self.broken.push(format!("{what} was {old:?} and is {new:?}"));
        }
        let (asked, given) = (names(&before["required"]), names(&now["required"]));
        let (more, fewer) = (given.difference(&asked), asked.difference(&given));
        match sent {
            Sent::ByClients => self.broken.extend(more.map(|name| format!("{what} now needs {name}"))),
            Sent::ByUs => self
                .broken
                .extend(fewer.map(|name| format!("{what} may lack {name} now"))),
        }
        for (name, property) in entries(&before["properties"]) {
            match now["properties"].get(name) {
                Some(found) => self.schema(property, found, sent, &format!("{what}.{name}"), depth + 1),
                None => self.broken.push(format!("{what} has no {name}")),
            }
        }
        if sent == Sent::ByClients {
            let (old, new) = (names(&before["enum"]), names(&now["enum"]));
            if !new.is_empty() {
                let gone = old.difference(&new);
                self.broken
                    .extend(gone.map(|value| format!("{what} does not take {value}")));
                if old.is_empty() {
                    self.broken.push(format!("{what} takes {new:?} alone"));
                }
            }
        }
        self.schema(&before["items"], &now["items"], sent, &format!("{what}[]"), depth + 1);
        for form in ["oneOf", "anyOf", "allOf"] {
            for (nth, old) in before[form].as_array().into_iter().flatten().enumerate() {
                let found = now[form].as_array().into_iter().flatten().any(|new| {
                    let mut tried = Comparison {
                        before: self.before,
                        now: self.now,
                        broken: Vec::new(),
                    };
                    tried.schema(old, new, sent, what, depth + 1);
                    tried.broken.is_empty()
                });
                if !found {
                    self.broken.push(format!("{what}: its form {nth} is gone"));
                }
            }
        }
    }
}

fn resolved(document: &Value, schema: &Value) -> Value {
    match schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
        Some(path) => document.pointer(path).cloned().unwrap_or_default(),
        None => schema.clone(),
    }
}

#[test]
fn what_breaks_a_client_is_found() {
    let document = |request: Value, answer: Value| {
        let content = |schema: Value| json!({"content": {"application/json": {"schema": schema}}});
        json!({"paths": {"/x": {"post": {
            "requestBody": content(json!({"$ref": "#/components/schemas/Request"})),
            "responses": {"200": content(answer)},
        }}}, "components": {"schemas": {"Request": request}}})
    };
    let object =
        |properties: Value, required: Value| json!({"type": "object", "properties": properties, "required": required});
    let request = object(json!({"a": {"enum": ["x", "y"]}}), json!(["a"]));
    let answer = object(json!({"b": {}}), json!(["b"]));
    let before = document(request.clone(), answer.clone());
    assert!(broken(&before, &before).is_empty());
    let more = document(
        object(json!({"a": {"enum": ["x", "y", "z"]}, "c": {}}), json!([])),
        object(json!({"b": {}, "c": {}}), json!(["b", "c"])),
    );
    assert!(broken(&before, &more).is_empty(), "{:?}", broken(&before, &more));
    for (request, answer, found) in [
        (
            object(json!({"a": {}, "c": {}}), json!(["a", "c"])),
            answer.clone(),
            "now needs c",
        ),
        (object(json!({"c": {}}), json!([])), answer.clone(), "has no a"),
        (
            object(json!({"a": {"enum": ["x"]}}), json!([])),
            answer.clone(),
            "does not take y",
        ),
        (
            object(json!({"a": {"type": "string", "enum": ["x", "y"]}}), json!([])),
            json!({"type": "array"}),
            "is {\"array\"}",
        ),
        (request.clone(), object(json!({"b": {}}), json!([])), "may lack b now"),
        (request, object(json!({}), json!([])), "has no b"),
    ] {
        let broken = broken(&before, &document(request, answer));
        assert!(broken.iter().any(|one| one.ends_with(found)), "{found}: {broken:?}");
    }
    assert_eq!(broken(&before, &json!({"paths": {}})), ["post /x is gone"]);
}
