//! What an answer must be if its request constrains sampling: JSON of a schema, or a call of a tool.
//! Pure; [`text::constraint`] follows the schema.

use edge::Problem;
use serde_json::{Value, json};
use text::answer::Tools;

/// The code of such an answer that is never trained on: because its caller is no run, which could
/// make any text likely by a schema, or because the trainer cannot know which tokens were excluded.
pub const UNTRAINABLE: &str = "constrained_sampling";

/// The whole answer is JSON.
#[derive(Debug, Clone, PartialEq)]
pub struct Constraint {
    pub schema: Value,
    /// The JSON may be a call: an object with `name` and `arguments`.
    pub calls_tool: bool,
}

/// OpenAI's `tool_choice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    Auto,
    /// No tools are shown.
    None,
    /// Any of them.
    Required,
    Named(String),
}

impl ToolChoice {
    /// Reads a chat's form, or that of Responses, which has the name one level higher.
    pub fn read(choice: Option<&Value>) -> Result<Self, Problem> {
        let Some(choice) = choice.filter(|choice| !choice.is_null()) else {
            return Ok(ToolChoice::Auto);
        };
        let name = choice["function"]["name"].as_str().or(choice["name"].as_str());
        match (choice.as_str(), choice["type"].as_str(), name) {
            (Some("auto"), ..) => Ok(ToolChoice::Auto),
            (Some("none"), ..) => Ok(ToolChoice::None),
            (Some("required"), ..) => Ok(ToolChoice::Required),
            (None, Some("function"), Some(name)) => Ok(ToolChoice::Named(name.to_owned())),
            _ => {
                let detail = "tool_choice must be \"auto\", \"none\", \"required\" or a function by its name";
                Err(Problem::bad_request(detail).with("field", "tool_choice"))
            }
        }
    }

    /// The constraint that makes the model call a tool.
    pub fn constraint(&self, tools: &Tools) -> Result<Option<Constraint>, Problem> {
        let is_chosen = |name: &str| match self {
            ToolChoice::Auto | ToolChoice::None => false,
            ToolChoice::Required => true,
            ToolChoice::Named(chosen) => chosen == name,
        };
        if matches!(self, ToolChoice::Auto | ToolChoice::None) {
            return Ok(None);
        }
        let chosen = tools.iter().filter(|(name, _)| is_chosen(name));
        let calls: Vec<Value> = chosen.enumerate().map(|(index, tool)| call(index, tool)).collect();
        if calls.is_empty() {
            let detail = "tool_choice asks for a tool that is not among tools";
            return Err(Problem::bad_request(detail).with("field", "tool_choice"));
        }
        Ok(Some(Constraint {
            schema: json!({"anyOf": calls}),
            calls_tool: true,
        }))
    }
}

impl Constraint {
    /// The answer is JSON of the format, or a call of one of the tools.
    pub fn or_call(mut self, tools: &Tools) -> Self {
        move_references(&mut self.schema, "#/anyOf/0");
        let calls = tools.iter().zip(1..).map(|(tool, index)| call(index, tool));
        let branches: Vec<Value> = std::iter::once(self.schema).chain(calls).collect();
        Constraint {
            schema: json!({"anyOf": branches}),
            calls_tool: true,
        }
    }
}

/// The schema of a call, as branch `index` of the whole.
fn call(index: usize, (name, arguments): (&str, &Value)) -> Value {
    let mut arguments = match arguments {
        Value::Object(schema) if !schema.is_empty() => arguments.clone(),
        _ => json!({"type": "object"}),
    };
    move_references(&mut arguments, &format!("#/anyOf/{index}/properties/arguments"));
    json!({
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": false,
    })
}

/// A schema refers to its own parts by their place in the document.
fn move_references(schema: &mut Value, to: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(reference) if name == "$ref" && reference.starts_with('#') => {
                        *reference = format!("{to}{}", reference[1..].trim_end_matches('/'));
                    }
                    value => move_references(value, to),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| move_references(value, to)),
        _ => {}
    }
}

/// The constraint of OpenAI's `response_format`, or of Responses' `text.format`, which has the schema
/// one level higher. `field`: its name.
pub fn of_format(format: Option<&Value>, field: &'static str) -> Result<Option<Constraint>, Problem> {
    let Some(format) = format.filter(|format| !format.is_null()) else {
        return Ok(None);
    };
    let schema = match format["type"].as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => json!({"type": "object"}),
        Some("json_schema") => {
            let schema = format["json_schema"].get("schema").or(format.get("schema"));
            let schema = schema.filter(|schema| schema.is_object());
            schema.cloned().ok_or_else(|| {
                Problem::bad_request(format!("{field} has no schema; give a JSON schema")).with("field", field)
            })?
        }
        _ => {
            let detail = format!("the type of {field} must be text, json_object or json_schema");
            return Err(Problem::bad_request(detail).with("field", field));
        }
    };
    Ok(Some(Constraint {
        schema,
        calls_tool: false,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_call_keeps_the_references_of_its_schema() {
        let tools = [
            json!({"function": {"name": "a", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": {"items": {"$ref": "#"}}}}}}),
            json!({"function": {"name": "b"}}),
        ];
        let tools = Tools::of(&tools);
        let constraint = ToolChoice::Required.constraint(&tools).unwrap().unwrap();
        let place = "#/anyOf/0/properties/arguments";
        let arguments = &constraint.schema["anyOf"][0]["properties"]["arguments"];
        assert_eq!(arguments["$ref"], format!("{place}/$defs/x"));
        assert_eq!(arguments["$defs"]["x"]["items"]["$ref"], place);
        let other = &constraint.schema["anyOf"][1]["properties"];
        assert_eq!(
            (&other["name"], &other["arguments"]),
            (&json!({"const": "b"}), &json!({"type": "object"}))
        );
        let named = ToolChoice::Named("b".into()).constraint(&tools).unwrap().unwrap();
        assert_eq!(named.schema["anyOf"].as_array().unwrap().len(), 1);
        assert!(ToolChoice::Named("c".into()).constraint(&tools).is_err());
        assert!(ToolChoice::Required.constraint(&Tools::default()).is_err());
        assert_eq!(ToolChoice::Auto.constraint(&tools).unwrap(), None);
    }

    #[test]
    fn a_format_leaves_room_for_calls() {
        let tools = Tools::of(&[json!({"function": {"name": "f", "parameters": {"$ref": "#/$defs/x"}}})]);
        let format = Constraint {
            schema: json!({"$ref": "#/$defs/y", "$defs": {"y": {"type": "integer"}}}),
            calls_tool: false,
        };
        let either = format.or_call(&tools);
        assert!(either.calls_tool);
        assert_eq!(either.schema["anyOf"][0]["$ref"], "#/anyOf/0/$defs/y");
        let call = &either.schema["anyOf"][1]["properties"];
        assert_eq!(call["arguments"]["$ref"], "#/anyOf/1/properties/arguments/$defs/x");
    }

    #[test]
    fn choices_and_formats_of_both_apis_are_read() {
        for choice in [
            json!({"type": "function", "function": {"name": "f"}}),
            json!({"type": "function", "name": "f"}),
        ] {
            assert_eq!(ToolChoice::read(Some(&choice)).unwrap(), ToolChoice::Named("f".into()));
        }
        assert_eq!(ToolChoice::read(None).unwrap(), ToolChoice::Auto);
        assert!(ToolChoice::read(Some(&json!({"type": "allowed_tools"}))).is_err());
        let schema = json!({"type": "integer"});
        for format in [
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
            json!({"type": "json_schema", "name": "n", "schema": schema}),
        ] {
            assert_eq!(of_format(Some(&format), "f").unwrap().unwrap().schema, schema);
        }
        assert_eq!(of_format(Some(&json!({"type": "text"})), "f").unwrap(), None);
        for bad in [
            json!("json"),
            json!({"type": "json_schema"}),
            json!({"type": "grammar"}),
        ] {
            assert!(of_format(Some(&bad), "f").is_err());
        }
    }
}
