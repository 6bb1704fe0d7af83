//! Constrains sampling: which token may come next so that the whole text is JSON of a schema.
//! `llguidance` does the work; this module bounds it and knows our tokenizers.
//!
//! A grammar is compiled when its request arrives, and a mask is computed for each token. Both stop
//! with an error when they have used up their fuel, so no schema can hold up an engine for long.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, token_bytes_from_tokenizer_json};
use serde_json::{Value, json};

/// Names the rules by which masks follow from a schema and a text: those of this module, and of the
/// library. An answer that was sampled by other rules cannot be scored by these.
pub const FORMAT: &str = "json_schema/1 llguidance/1.9.1";

/// Longest schema, in bytes of JSON.
pub const SCHEMA_BYTES_MAX: usize = 128 << 10;

/// Steps of a lexer that take some 20 ms, and symbols of a grammar of a few hundred KiB.
const COMPILE_FUEL: u64 = 1_000_000;
const GRAMMAR_SYMBOLS_MAX: usize = 200_000;
/// Steps of a lexer, and items of a parser, for one token's mask. The engine computes masks one
/// after another, so it limits how many sequences have one. Usual schemas need up to 6,000 steps
/// and 600 items in a vocabulary of 22,000 tokens.
const MASK_FUEL: u64 = 20_000;
const MASK_ITEMS_MAX: usize = 10_000;
/// States take 1 to 2 KiB each, so an answer holds at most some 20 MiB.
const LEXER_STATES_MAX: usize = 10_000;

/// Why sampling cannot be constrained, or not any more. Contains no text of an answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the schema has {0} bytes; at most {SCHEMA_BYTES_MAX}")]
    TooLong(usize),
    #[error("the schema cannot be followed: {0}")]
    Schema(String),
    #[error("the tokenizer cannot be constrained: {0}")]
    Tokenizer(String),
    #[error("the schema takes too much work at this token, or allows none")]
    Stuck,
}

/// What the constraints of a tokenizer share.
pub(crate) struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// `json`: of the tokenizer. `stop_id`: the token after a whole text.
    pub(crate) fn new(json: &str, stop_id: Option<u32>) -> Result<Self, Error> {
        let refuse = |error: anyhow::Error| Error::Tokenizer(format!("{error:#}"));
        let stop_id = stop_id.ok_or_else(|| Error::Tokenizer("it has no stop token".into()))?;
        let json: Value = serde_json::from_str(json).map_err(|error| Error::Tokenizer(error.to_string()))?;
        let words = token_bytes_from_tokenizer_json(&json).map_err(refuse)?;
        let size = u32::try_from(words.len()).unwrap_or(u32::MAX);
        let trie = TokTrie::from(&TokRxInfo::new(size, stop_id), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(refuse)?;
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: COMPILE_FUEL,
            max_grammar_size: GRAMMAR_SYMBOLS_MAX,
            step_lexer_fuel: MASK_FUEL,
            step_max_items: MASK_ITEMS_MAX,
            max_lexer_states: LEXER_STATES_MAX,
            precompute_large_lexemes: false,
            // errors would have the tokens sampled so far
            verbose_errors: false,
            ..ParserLimits::default()
        };
        factory.quiet();
        Ok(Grammars { factory })
    }

    pub(crate) fn compile(&self, schema: &Value) -> Result<Matcher, Error> {
        let bytes = schema.to_string().len();
        if bytes > SCHEMA_BYTES_MAX {
            return Err(Error::TooLong(bytes));
        }
        let grammar = TopLevelGrammar::from_json_schema(lenient(schema));
        let parser = self.factory.create_parser(grammar);
        let matcher = llguidance::Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(Error::Schema(error));
        }
        Ok(Matcher(matcher))
    }
}

/// The schema with `llguidance`'s option to leave out what it cannot follow, such as `uniqueItems`,
/// instead of an error. Engines elsewhere that use the library read it, and others ignore it.
pub fn lenient(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(fields) = schema.as_object_mut() {
        let options = fields.entry("x-guidance").or_insert_with(|| json!({}));
        if let Some(options) = options.as_object_mut() {
            options.insert("lenient".into(), true.into());
        }
    }
    schema
}

/// Follows one text.
pub struct Matcher(llguidance::Matcher);

impl Matcher {
    /// Sets the logits of ids that cannot come next to −∞. `stop_ids` can come where the text may
    /// end; `decline_id` cannot, even if it is one of them, because declining is no JSON.
    pub fn mask(&mut self, logits: &mut [f32], stop_ids: &[u32], decline_id: Option<u32>) -> Result<(), Error> {
        let mask = self.0.compute_mask_or_eos().map_err(|_| Error::Stuck)?;
        let may_end = self.may_end()?;
        for (id, logit) in (0u32..).zip(logits.iter_mut()) {
            let allowed = match stop_ids.contains(&id) {
                _ if decline_id == Some(id) => false,
                true => may_end,
                false => (id as usize) < mask.len() && mask.is_allowed(id),
            };
            if !allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        match logits.iter().any(|logit| logit.is_finite()) {
            true => Ok(()),
            false => Err(Error::Stuck),
        }
    }

    /// Whether the text so far is whole, so that a stop id may come.
    pub fn may_end(&mut self) -> Result<bool, Error> {
        Ok(self.0.is_stopped() || self.0.is_accepting().map_err(|_| Error::Stuck)?)
    }

    /// Goes on after a sampled token that is no stop id.
    pub fn accept(&mut self, id: u32) -> Result<(), Error> {
        self.0.consume_token(id).map_err(|_| Error::Stuck)
    }
}

/// The copy follows a text of its own from here on.
impl Clone for Matcher {
    fn clone(&self) -> Self {
        Matcher(self.0.deep_clone())
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const END: u32 = 256;

    /// Every byte is a token.
    fn grammars() -> Grammars {
        let (grammars, end) = grammars_of([]);
        assert_eq!(end, END);
        grammars
    }

    /// Every byte and every word is a token. With the id of the stop token, the last one.
    fn grammars_of(words: impl IntoIterator<Item = String>) -> (Grammars, u32) {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let words: std::collections::BTreeSet<Vec<u8>> = words.into_iter().map(String::into_bytes).collect();
        let words = words.into_iter().filter(|word| word.len() > 1);
        let tokens = (0..=255u8).map(|byte| vec![byte]).chain(words);
        let written = tokens.map(|token| token.into_iter().map(crate::tokenizer::byte_char).collect::<String>());
        let vocab: serde_json::Map<String, Value> = written.zip((0u32..).map(Value::from)).collect();
        let end = u32::try_from(vocab.len()).unwrap();
        let special = json!({"id": end, "content": "<|end|>", "special": true});
        let json = json!({"added_tokens": [special], "decoder": bytes, "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        (Grammars::new(&json.to_string(), Some(end)).unwrap(), end)
    }

    /// What `matcher` lets a model write whose logits are pseudo-random, up to 400 tokens.
    fn write(matcher: &mut Matcher, seed: u64) -> Option<String> {
        let mut state = seed | 1;
        let mut text = Vec::new();
        for _ in 0..400 {
            let mut logits: Vec<f32> = (0..=END)
                .map(|id| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    // it likes to end texts, objects and lists, and never writes white space first
                    let eager = [b'"', b'}', b']'].contains(&(id as u8)) || id == END;
                    (state >> 40) as f32 + if eager { 2e7 } else { 0.0 }
                })
                .collect();
            matcher.mask(&mut logits, &[END], None).unwrap();
            let best = (0..=END).max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]))?;
            if best == END {
                return String::from_utf8(text).ok();
            }
            matcher.accept(best).unwrap();
            text.push(best as u8);
        }
        None
    }

    #[test]
    fn what_is_written_follows_the_schema() {
        let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "at"], "properties": {
            "name": {"enum": ["weather", "time"]},
            "at": {"$ref": "#/$defs/place"},
        }, "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}});
        let matcher = grammars().compile(&schema).unwrap();
        for seed in 0..40 {
            let text = write(&mut matcher.clone(), seed).unwrap();
            let value: Value = serde_json::from_str(&text).unwrap();
            assert!(value["name"] == "weather" || value["name"] == "time", "{text}");
            assert!(value["at"].as_array().unwrap().len() <= 3, "{text}");
            assert_eq!(value.as_object().unwrap().len(), 2, "{text}");
        }
    }

    #[test]
    fn the_order_of_a_schemas_properties_is_kept() {
        let schema = json!({"type": "object", "required": ["z", "a"], "additionalProperties": false,
            "properties": {"z": {"const": 1}, "a": {"const": 2}}});
        let mut matcher = grammars().compile(&schema).unwrap();
        for byte in *b"{\"" {
            matcher.accept(byte.into()).unwrap();
        }
        let mut logits = vec![0.0; 257];
        matcher.mask(&mut logits, &[END], None).unwrap();
        assert!(logits[usize::from(b'z')].is_finite() && logits[usize::from(b'a')].is_infinite());
    }

    #[test]
    fn the_format_names_the_version_of_the_library() {
        let lock = include_str!("../../../Cargo.lock");
        let of_library = lock
            .split("[[package]]")
            .find(|package| package.contains("name = \"llguidance\""));
        let version = of_library.unwrap().split('"').nth(3).unwrap();
        assert!(FORMAT.ends_with(&format!("llguidance/{version}")), "{version}");
    }

    #[test]
    fn a_text_may_end_but_never_with_a_decline() {
        let mut matcher = grammars().compile(&json!({"const": 1})).unwrap();
        matcher.accept(b'1'.into()).unwrap();
        let mut logits = vec![0.0; 257];
        matcher.mask(&mut logits, &[END, 7], Some(7)).unwrap();
        assert!(logits[END as usize].is_finite() && logits[7].is_infinite());
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        let grammars = grammars();
        for (schema, expected) in [
            (
                json!({"type": "object", "description": "x".repeat(SCHEMA_BYTES_MAX)}),
                "at most",
            ),
            (json!({"type": "sandwich"}), "cannot be followed"),
            (json!({"$ref": "#/$defs/missing"}), "cannot be followed"),
            (json!({"type": "string", "pattern": "(?=x)y"}), "cannot be followed"),
            (json!(false), "cannot be followed"),
        ] {
            let error = grammars.compile(&schema).map(drop).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn what_a_grammar_cannot_check_is_not_enforced_and_the_rest_is() {
        let grammars = grammars();
        let accepts = |schema: &Value, text: &str| {
            let mut matcher = grammars.compile(schema).unwrap();
            let all = text.bytes().all(|byte| matcher.accept(byte.into()).is_ok());
            all && matcher.may_end().unwrap()
        };
        // what pydantic makes of `set[str]`
        let set = json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true});
        assert!(accepts(&set, r#"["a","b"]"#) && accepts(&set, r#"["a","a"]"#));
        assert!(!accepts(&set, "[1]"));
        let object = |keyword: &str, value: Value| json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], keyword: value});
        for (keyword, value) in [
            ("not", json!({"required": ["y"]})),
            ("if", json!({"properties": {"x": {"const": 1}}})),
            ("then", json!({"required": ["y"]})),
            ("else", json!({"required": ["z"]})),
            ("propertyNames", json!({"pattern": "^x$"})),
            ("dependentRequired", json!({"x": ["y"]})),
            ("dependentSchemas", json!({"x": {"required": ["y"]}})),
            ("unevaluatedProperties", json!(false)),
        ] {
            let schema = object(keyword, value);
            assert!(accepts(&schema, r#"{"x":1,"y":2}"#), "{keyword}");
            assert!(!accepts(&schema, r#"{"x":"a"}"#), "{keyword}");
        }
        for (keyword, value) in [
            ("contains", json!({"const": 1})),
            ("minContains", json!(1)),
            ("maxContains", json!(1)),
            ("unevaluatedItems", json!(false)),
        ] {
            let schema = json!({"type": "array", "items": {"type": "integer"}, keyword: value});
            assert!(accepts(&schema, "[2,3]") && !accepts(&schema, "[true]"), "{keyword}");
        }
        assert!(accepts(&json!({"not": {"type": "null"}}), "null"));
        // a format is only an annotation, unless the grammar knows it
        let text = |format: &str| json!({"type": "string", "format": format});
        assert!(accepts(&text("password"), r#""a""#) && !accepts(&text("password"), "1"));
        assert!(accepts(&text("date"), r#""2026-01-02""#) && !accepts(&text("date"), r#""a""#));
        // of `oneOf`, one or more may match
        let one = json!({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]});
        assert!(accepts(&one, "1") && accepts(&one, "7.5") && !accepts(&one, "true"));
        let own = json!({"type": "array", "uniqueItems": true, "x-guidance": {"whitespace_flexible": false}});
        assert!(accepts(&own, "[]") && !accepts(&own, "[ ]"));
        let options = json!({"whitespace_flexible": false, "lenient": true});
        assert_eq!(lenient(&own)["x-guidance"], options);
    }

    #[test]
    fn a_hard_schema_is_refused_or_stops_but_does_not_hang() {
        let grammars = grammars();
        let refused = |schema: &Value| match grammars.compile(schema) {
            Err(error) => Some(error.to_string()),
            Ok(mut matcher) => {
                let stuck = matcher.mask(&mut vec![0.0; 257], &[END], None).err();
                let work = matcher.0.last_step_stats().map_or(0, |work| work.lexer_cost);
                assert!(work <= 2 * MASK_FUEL, "{work}");
                stuck.map(|error| error.to_string())
            }
        };
        let many: Vec<Value> = (0..2000)
            .map(|n| json!({"type": "object", "properties": {format!("p{n}"): {"minLength": n}}}))
            .collect();
        assert!(refused(&json!({"anyOf": many})).is_some());
        let pattern = |pattern: &str| json!({"type": "string", "pattern": pattern});
        assert_eq!(refused(&pattern("^(a|b|ab|ba|aab|bba){1,300}c(.{0,2000}d){20}$")), None);
        assert_eq!(refused(&pattern("^(([a-z]{1,500}[0-9]{1,500}){1,500}x){1,500}$")), None);
    }

    #[test]
    fn usual_schemas_take_less_than_half_of_the_fuel() {
        // longer tokens lead to more states of the lexer
        let words = include_str!("constraint.rs").split_inclusive(|c: char| !c.is_alphanumeric());
        let words = words.flat_map(|word| [word.to_owned(), format!(" {word}"), format!("\"{word}")]);
        let (grammars, end) = grammars_of(words);
        let tool = |n: usize| {
            json!({"type": "object", "required": ["name", "arguments"], "properties": {
            "name": {"const": format!("tool_{n}")}, "arguments": {"type": "object", "properties": {
                "path": {"type": "string"}, "limit": {"type": "integer", "minimum": 0, "maximum": 1000},
                "items": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}}}}}})
        };
        let fields = (0..60).map(|n| (format!("field_{n}"), json!({"type": "string", "maxLength": 200})));
        for schema in [
            json!({"anyOf": (0..100).map(tool).collect::<Vec<_>>()}),
            json!({"type": "object", "properties": fields.collect::<serde_json::Map<_, _>>()}),
            json!({"type": "array", "minItems": 4, "items": {"type": "string", "format": "date-time"}}),
        ] {
            let mut matcher = grammars.compile(&schema).unwrap();
            let mut state = 1u64;
            for _ in 0..60 {
                let mut logits: Vec<f32> = (0..=end)
                    .map(|_| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        (state >> 40) as f32
                    })
                    .collect();
                matcher.mask(&mut logits, &[end], None).unwrap();
                let work = matcher.0.last_step_stats().unwrap();
                assert!(work.lexer_cost < MASK_FUEL / 2, "{work:?}");
                assert!(work.all_items < MASK_ITEMS_MAX / 2, "{work:?}");
                let best = (0..=end).max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
                let Some(best) = best.filter(|best| *best != end) else {
                    break;
                };
                matcher.accept(best).unwrap();
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_json_object_is_allowed_by_the_schema_of_objects(seed in any::<u64>()) {
            let mut matcher = grammars().compile(&json!({"type": "object"})).unwrap();
            if let Some(text) = write(&mut matcher, seed) {
                let value: Value = serde_json::from_str(&text).unwrap();
                prop_assert!(value.is_object());
            }
        }
    }
}
