use super::*;
use crate::tokenizer::Tokenizer;
use bytes::Bytes;
use serde::Deserialize;
use time::macros::datetime;

/// The results of `transformers` for the cases in `tools/golden/chat.py`.
#[derive(Deserialize)]
struct Golden {
    special_tokens: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    documents: Option<Vec<Value>>,
    #[serde(default)]
    add_generation_prompt: bool,
    continue_final_message: Option<String>,
    #[serde(default)]
    variables: BTreeMap<String, Value>,
    expected: Option<String>,
    error: Option<String>,
    ids: Option<Vec<u32>>,
    assistant_mask: Option<String>,
}

fn read(file: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/chat");
    std::fs::read(format!("{folder}/{file}")).unwrap()
}

fn checkpoint(files: &[(&str, &str)]) -> Checkpoint {
    let files = files
        .iter()
        .map(|(name, text)| (name.to_string(), Bytes::from(text.to_string())));
    Checkpoint {
        files: files.collect(),
        ..Checkpoint::default()
    }
}

fn user(content: &str) -> Conversation {
    Conversation {
        messages: vec![Value::from_pairs([("role", "user"), ("content", content)])],
        ..Conversation::default()
    }
}

fn template(source: &str) -> Templates {
    Templates::new([("default".to_string(), source.to_string())].into(), BTreeMap::new()).unwrap()
}

#[test]
fn conversations_are_rendered_and_encoded_as_transformers_does() {
    let golden: Golden = serde_json::from_slice(&read("cases.json")).unwrap();
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint(&[(
        "tokenizer.json",
        std::str::from_utf8(&read("byte_level.json")).unwrap(),
    )]))
    .unwrap();
    let sources = golden.cases.iter().map(|case| {
        let source = read(&format!("templates/{}.jinja", case.template));
        (case.template.clone(), String::from_utf8(source).unwrap())
    });
    let templates = Templates::new(sources.collect(), golden.special_tokens).unwrap();
    assert!(golden.cases.len() > 20);
    for case in golden.cases {
        let mut conversation = Conversation {
            messages: case.messages,
            tools: case.tools,
            documents: case.documents,
            template: Some(case.template),
            add_generation_prompt: case.add_generation_prompt,
            continue_final_message: case.continue_final_message,
            variables: case.variables,
            mark_assistant: false,
            now: Some(datetime!(2026-07-04 09:05:03 UTC)),
        };
        let name = case.name;
        let rendered = match (templates.render(&conversation), case.expected) {
            (Ok(rendered), Some(expected)) => {
                let differ: Vec<_> = rendered
                    .text
                    .lines()
                    .zip(expected.lines())
                    .filter(|(a, b)| a != b)
                    .collect();
                assert!(differ.is_empty(), "{name}: ours, transformers': {differ:#?}");
                assert_eq!(rendered.text, expected, "{name}");
                rendered
            }
            (Err(Error::Refused(message)), None) => {
                assert_eq!(Some(message), case.error, "{name}");
                continue;
            }
            (Err(Error::Conversation(_)), None) => continue,
            (ours, theirs) => panic!("{name}: {ours:?} where transformers has {theirs:?} {:?}", case.error),
        };
        if let (Some(ids), Some(mask)) = (case.ids, case.assistant_mask) {
            conversation.mark_assistant = true;
            let marked = templates.render(&conversation).unwrap();
            assert_eq!(marked.text, rendered.text, "{name}");
            let (our_ids, our_mask) = tokenizer.encode_marked(&marked.text, &marked.assistant).unwrap();
            assert_eq!(our_ids, ids, "{name}");
            let our_mask: String = our_mask.iter().map(|&marked| if marked { '1' } else { '0' }).collect();
            assert_eq!(our_mask, mask, "{name}");
        }
    }
}

#[test]
fn templates_are_found_in_all_usual_files() {
    let text = |checkpoint: &Checkpoint, name: Option<&str>, tools: bool| {
        let conversation = Conversation {
            template: name.map(str::to_string),
            tools: tools.then(Vec::new),
            ..user("")
        };
        Templates::from_checkpoint(checkpoint)?
            .render(&conversation)
            .map(|rendered| rendered.text)
    };
    let one = checkpoint(&[(
        "tokenizer_config.json",
        r#"{"chat_template": "one {{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": null}"#,
    )]);
    assert_eq!(text(&one, None, true).unwrap(), "one <s>");
    let many = checkpoint(&[(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]}"#,
    )]);
    assert_eq!(text(&many, None, false).unwrap(), "d");
    assert_eq!(text(&many, None, true).unwrap(), "t");
    assert_eq!(text(&many, Some("rag"), true).unwrap(), "r");
    let error = text(&many, Some("other"), true).unwrap_err().to_string();
    assert!(error.contains("default, rag, tool_use"), "{error}");
    let mut file = many.clone();
    file.files
        .insert("chat_template.jinja".into(), "file {{ pad_token }}".into());
    file.files
        .insert("special_tokens_map.json".into(), r#"{"pad_token": "<p>"}"#.into());
    assert_eq!(text(&file, None, true).unwrap(), "file <p>");
    let processor = checkpoint(&[("chat_template.json", r#"{"chat_template": "p"}"#)]);
    assert_eq!(text(&processor, None, false).unwrap(), "p");
    assert!(matches!(text(&checkpoint(&[]), None, false), Err(Error::NoTemplate)));
    let broken = checkpoint(&[("tokenizer_config.json", r#"{"chat_template": [{"name": "x"}]}"#)]);
    assert!(matches!(text(&broken, None, false), Err(Error::Malformed { .. })));
    let broken = checkpoint(&[("chat_template.jinja", "a\n{% if %}")]);
    let error = text(&broken, None, false).unwrap_err().to_string();
    assert!(error.starts_with("chat template `default`: line 2"), "{error}");
}

#[test]
fn an_endless_template_is_stopped() {
    let endless = template("{% for a in range(9000) %}{% for b in range(9000) %}{{ a * b }}{% endfor %}{% endfor %}");
    let error = endless.render(&user("hi")).unwrap_err().to_string();
    assert!(error.contains("too many steps"), "{error}");
}

#[test]
fn rendering_errors_name_the_line() {
    for source in [
        "\n{{ messages[0].content.no_such_method() }}",
        "\n{{ messages[0].a.b }}",
        "\n{{ x | tojson }}",
    ] {
        let error = template(source).render(&user("secret")).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::Render(_)) && text.contains("line 2") && !text.contains("secret"),
            "{text}"
        );
    }
}

#[test]
fn marks_are_removed_even_if_the_conversation_contains_such_characters() {
    let conversation = Conversation {
        mark_assistant: true,
        ..user("a\u{fdd0}b")
    };
    let rendered = template("x{% generation %}{{ messages[0].content }}{%- endgeneration -%}  y")
        .render(&conversation)
        .unwrap();
    assert_eq!(rendered.text, "xa\u{fdd0}by");
    assert_eq!(&rendered.text[rendered.assistant[0].clone()], "a\u{fdd0}b");
}

#[test]
fn contradictions_are_refused() {
    let templates = template("{{ messages[0].content }}");
    let refused = [
        Conversation::default(),
        Conversation {
            messages: vec!["text".into()],
            ..Conversation::default()
        },
        Conversation {
            add_generation_prompt: true,
            continue_final_message: Some("content".into()),
            ..user("hi")
        },
        Conversation {
            continue_final_message: Some("thinking".into()),
            ..user("hi")
        },
        Conversation {
            variables: [("messages".to_string(), Value::from(1))].into(),
            ..user("hi")
        },
    ];
    for conversation in refused {
        let result = templates.render(&conversation);
        assert!(matches!(result, Err(Error::Conversation(_))), "{result:?}");
    }
    let deletes = template("{{ messages[0].content[:1] }}");
    let conversation = Conversation {
        continue_final_message: Some("content".into()),
        ..user("hello")
    };
    let result = deletes.render(&conversation);
    assert!(matches!(result, Err(Error::Conversation(_))), "{result:?}");
}

/// A conversation from JSON, with a generation prompt.
fn chat(messages: &str) -> Conversation {
    Conversation {
        messages: serde_json::from_str(messages).unwrap(),
        ..Conversation::default()
    }
}

const CALLS: &str = r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null, "tool_calls":
    [{"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]}]"#;

#[test]
fn parts_reach_a_template_in_the_form_that_it_reads() {
    let parts = r#"[{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]"#;
    let text = r#"[{"role": "user", "content": "AB"}]"#;
    for (source, of_parts, of_text) in [
        // as Qwen 3's
        (
            "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}{{ '' }}{% endif %}>{% endfor %}",
            "<A\nB>",
            "<AB>",
        ),
        // prints lists
        ("{{ messages[0].content }}", "A\nB", "AB"),
        ("{{ messages[0].content | tojson }}", "\"A\\nB\"", "\"AB\""),
        // fails
        ("{{ 'x' + messages[0].content }}", "xA\nB", "xAB"),
        // reads the first part
        (
            "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}{{ messages[0].content[0].text }}{% endif %}",
            "A\nB",
            "AB",
        ),
        // reads parts alone
        (
            "{% for part in messages[0].content %}{{ part['text'] }}|{% endfor %}",
            "A|B|",
            "AB|",
        ),
    ] {
        let template = template(source);
        assert_eq!(template.render(&chat(parts)).unwrap().text, of_parts, "{source}");
        assert_eq!(template.render(&chat(text)).unwrap().text, of_text, "{source}");
    }
}

#[test]
fn a_message_that_does_not_reach_the_prompt_is_refused_by_its_place() {
    let users = template("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}");
    let critic = r#"[{"role": "user", "content": "Hi"}, {"role": "critic", "content": "Zounds"}]"#;
    let error = users.render(&chat(critic)).unwrap_err().to_string();
    assert!(
        error.contains("messages[1] of the role critic") && !error.contains("Zounds"),
        "{error}"
    );
    let image =
        r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "Hi"}]}]"#;
    let error = users.render(&chat(image)).unwrap_err().to_string();
    assert!(error.contains("messages[0]"), "{error}");
    // a template may change a text
    let changed = template("{{ messages[0].content | upper | replace('HI', 'there') }}");
    assert_eq!(
        changed
            .render(&chat(r#"[{"role": "user", "content": "Hi there"}]"#))
            .unwrap()
            .text,
        "there THERE"
    );
}

#[test]
fn a_developer_is_the_system_of_a_template_that_does_not_know_it() {
    let developer = r#"[{"role": "developer", "content": "Be brief"}]"#;
    let systems = template("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}");
    assert_eq!(systems.render(&chat(developer)).unwrap().text, "Be brief");
    let knows = template(
        "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{{ m.content }}{% endfor %}",
    );
    assert_eq!(knows.render(&chat(developer)).unwrap().text, "developer!Be brief");
}

#[test]
fn arguments_of_calls_are_objects_or_the_text_that_the_template_wants() {
    let object =
        "{{ messages[0].content }}{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}";
    // as DeepSeek V3's
    let text = "{{ messages[0].content }}{% for c in messages[1].tool_calls %}{% if messages[1].content is none %}{{ 'f' + c.function.arguments }}\
        {% else %}{{ messages[1].content + c.function.arguments }}{% endif %}{% endfor %}";
    for (arguments, as_object, as_text) in [
        (
            r#""{\"z\": 1, \"a\": [2]}""#,
            r#"Hi{"z": 1, "a": [2]}"#,
            r#"Hif{"z": 1, "a": [2]}"#,
        ),
        (r#""""#, "Hi{}", "Hif"),
        (r#""no JSON""#, r#"Hi"no JSON""#, "Hifno JSON"),
    ] {
        let conversation = chat(&CALLS.replace("ARGUMENTS", arguments));
        assert_eq!(template(object).render(&conversation).unwrap().text, as_object);
        assert_eq!(template(text).render(&conversation).unwrap().text, as_text);
    }
}

#[test]
fn templates_may_use_what_python_and_jinja_have() {
    for (source, expected) in [
        ("{{ 'a-b-c'.split('-', maxsplit=1) | join('|') }}", "a|b-c"),
        ("{{ 'a-b-c'.rsplit('-', maxsplit=1) | join('|') }}", "a-b|c"),
        ("{{ 'abc'.index('c') }}{{ [1, 2].index(2) }}", "21"),
        (
            "{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '.') }}|{{ 'a'.center(3) }}|{{ '7'.zfill(3) }}",
            "a  |..a| a |007",
        ),
        (
            "{{ '42' | int + 1 }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ '3.9' | int }}",
            "43073",
        ),
        ("{{ range is callable }}{{ 1 is callable }}", "TrueFalse"),
        ("{{ 'a%sb' | format(1) }}", "a1b"),
        ("{% filter upper %}a{% endfilter %}", "A"),
        ("a\r\nb\rc", "a\nb\nc"),
        (
            "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
            "2",
        ),
    ] {
        let source = format!("{source}{{{{ messages[0].content }}}}");
        let rendered = template(&source).render(&user("!")).map(|rendered| rendered.text);
        assert_eq!(rendered.unwrap(), format!("{expected}!"), "{source}");
    }
}
