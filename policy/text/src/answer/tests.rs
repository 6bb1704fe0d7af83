use super::*;
use proptest::prelude::*;
use serde_json::json;

fn tools() -> Tools {
    Tools::of(&[
        json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties":
            {"city": {"type": "string"}, "days": {"type": "integer"}}}}}),
        json!({"type": "function", "function": {"name": "write", "parameters": {}}}),
    ])
}

fn layout(format: Format) -> Layout {
    Layout {
        calls: Some((format, tools())),
        ..Layout::default()
    }
}

fn text(text: &str) -> Part {
    Part::Text(text.into())
}

fn reasoning(text: &str) -> Part {
    Part::Reasoning(text.into())
}

fn call(name: &str, arguments: &str) -> Part {
    Part::Call(Call {
        name: name.into(),
        arguments: arguments.into(),
    })
}

/// The parts when the answer comes in `pieces`.
fn streamed<'a>(layout: &Layout, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parser = Parser::new(layout.clone());
    let mut parts: Vec<Part> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    joined(parts)
}

const DEEPSEEK_3: &str = "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \
    \"Bonn\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{}\n```<｜tool▁call▁end｜>\
    <｜tool▁calls▁end｜>";
const DEEPSEEK_31: &str = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Bonn\"}<｜tool▁call▁end｜>\
    <｜tool▁call▁begin｜>write<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";

#[test]
fn every_format_is_read() {
    let bonn = || call("weather", "{\"city\": \"Bonn\"}");
    let both = || vec![bonn(), call("write", "{}")];
    for (format, answer, expected) in [
        (
            Format::Hermes,
            "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}\n</tool_call>\n\
             <tool_call>\n{\"name\": \"write\", \"arguments\": {}}\n</tool_call>",
            [vec![text("I look.")], both()].concat(),
        ),
        (
            Format::Hermes,
            "<tool_call>{\"arguments\": \"{\\\"city\\\": \\\"Bonn\\\"}\", \"name\": \"weather\"}</tool_call>",
            vec![call("weather", "{\"city\": \"Bonn\"}")],
        ),
        // the stop token came instead of the end
        (
            Format::Hermes,
            "<tool_call>\n{\"name\": \"write\"}\n",
            vec![call("write", "{}")],
        ),
        (
            Format::QwenXml,
            "Well:\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n\
             </parameter>\n</function>\n</tool_call>",
            vec![text("Well:"), call("weather", "{\"city\": \"Bonn\", \"days\": 3}")],
        ),
        (
            Format::QwenXml,
            "<function=weather><parameter=city>\n7\n</parameter><parameter=days>many</parameter></function>",
            vec![call("weather", "{\"city\": \"7\", \"days\": \"many\"}")],
        ),
        (
            Format::QwenXml,
            "<tool_call><function=write><parameter=text>\na\n\n b</tool_call>\n</parameter></function></tool_call>",
            vec![call("write", "{\"text\": \"a\\n\\n b</tool_call>\"}")],
        ),
        (
            Format::Llama,
            "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}; {\"name\": \"write\", \"parameters\": {}}",
            both(),
        ),
        (
            Format::Llama,
            "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}",
            vec![bonn()],
        ),
        (
            Format::Mistral,
            "I look. [TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}, {\"name\": \"write\"}]",
            [vec![text("I look.")], both()].concat(),
        ),
        (
            Format::Mistral,
            "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Bonn\"}[TOOL_CALLS]write[ARGS]{}",
            both(),
        ),
        (Format::DeepSeek, DEEPSEEK_3, [vec![text("I look.")], both()].concat()),
        (Format::DeepSeek, DEEPSEEK_31, both()),
        (
            Format::Json,
            "{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}",
            vec![bonn()],
        ),
    ] {
        assert_eq!(layout(format).parse(answer), expected, "{format:?}: {answer}");
        let characters: Vec<String> = answer.chars().map(String::from).collect();
        let one_by_one = streamed(&layout(format), characters.iter().map(String::as_str));
        assert_eq!(one_by_one, expected, "{format:?}: {answer}");
    }
}

#[test]
fn an_end_inside_an_argument_does_not_end_the_call() {
    let answer = "<tool_call>{\"name\": \"write\", \"arguments\": {\"text\": \"</tool_call>\"}}</tool_call>done";
    let expected = [call("write", "{\"text\": \"</tool_call>\"}"), text("done")];
    assert_eq!(layout(Format::Hermes).parse(answer), expected);
}

#[test]
fn what_looks_like_a_call_but_is_malformed_stays_text() {
    for (format, answer) in [
        (Format::Hermes, "<tool_call>{\"name\": 3}</tool_call> sorry\n"),
        (
            Format::Hermes,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city",
        ),
        (
            Format::Hermes,
            "<tool_call>{\"name\": \"weather\", \"arguments\": [1]}</tool_call>",
        ),
        (Format::Hermes, "a < b <tool_"),
        (Format::Hermes, "<tool_call>"),
        (Format::QwenXml, "<function=>x</function>"),
        (Format::QwenXml, "<tool_call>\n<function=weather>\n<parameter=city>\nBo"),
        (Format::QwenXml, "use <function=sin> here"),
        (Format::Llama, "{\"name\": \"unknown\", \"parameters\": {}}"),
        (Format::Llama, "{\"name\": \"weather\", \"parameters\": {}} is my call"),
        (Format::Llama, "{\"temperature\": 21}\n\n"),
        (Format::Mistral, "[TOOL_CALLS] none"),
        (Format::Mistral, "[TOOL_CALLS][{\"name\": \"weather\", \"argume"),
        (Format::DeepSeek, "<｜tool▁calls▁begin｜>weather<｜tool▁calls▁end｜>"),
        (Format::DeepSeek, "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\""),
        (Format::Json, "{\"name\": \"weather\", \"arg"),
    ] {
        assert_eq!(layout(format).parse(answer), [text(answer)], "{format:?}");
    }
}

#[test]
fn a_call_whose_arguments_no_value_can_hold_stays_text() {
    let deep = format!("{{\"x\": {}{}}}", "[".repeat(200), "]".repeat(200));
    for arguments in ["{\"x\": 1e999}", deep.as_str()] {
        let quoted = serde_json::Value::from(arguments);
        for (format, answer) in [
            (
                Format::Hermes,
                format!("<tool_call>{{\"name\": \"write\", \"arguments\": {arguments}}}</tool_call>"),
            ),
            (
                Format::Hermes,
                format!("<tool_call>{{\"name\": \"write\", \"arguments\": {quoted}}}</tool_call>"),
            ),
            (
                Format::Llama,
                format!("{{\"name\": \"write\", \"parameters\": {arguments}}}"),
            ),
            (Format::Mistral, format!("[TOOL_CALLS]write[ARGS]{arguments}")),
            (
                Format::Mistral,
                format!("[TOOL_CALLS][{{\"name\": \"write\", \"arguments\": {arguments}}}]"),
            ),
            (
                Format::DeepSeek,
                format!("<｜tool▁call▁begin｜>write<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"),
            ),
            (
                Format::Json,
                format!("{{\"name\": \"write\", \"arguments\": {arguments}}}"),
            ),
        ] {
            assert_eq!(layout(format).parse(&answer), [text(&answer)], "{format:?}: {answer}");
            let characters = answer.chars().map(String::from).collect::<Vec<_>>();
            let one_by_one = streamed(&layout(format), characters.iter().map(String::as_str));
            assert_eq!(one_by_one, [text(&answer)], "{format:?}: {answer}");
        }
    }
    let days = "<function=weather><parameter=days>1e999</parameter></function>";
    assert_eq!(layout(Format::QwenXml).parse(days), [text(days)]);
}

#[test]
fn a_call_after_a_malformed_one_is_found() {
    let answer = "<tool_call>{oops <tool_call>{\"name\": \"write\"}</tool_call> <tool_call>oops</tool_call>";
    assert_eq!(
        layout(Format::Hermes).parse(answer),
        [
            text("<tool_call>{oops"),
            call("write", "{}"),
            text("<tool_call>oops</tool_call>")
        ]
    );
}

#[test]
fn many_malformed_calls_end_the_search() {
    let answer = "<tool_call>".repeat(10_000);
    assert_eq!(layout(Format::Hermes).parse(&answer), [text(&answer)]);
    let ends = format!("<tool_call>{{\"a\": \"{}", "</tool_call>".repeat(10_000));
    assert_eq!(layout(Format::Hermes).parse(&ends), [text(&ends)]);
}

#[test]
fn reasoning_is_separated_if_asked_for() {
    let asked = Layout {
        separate_reasoning: true,
        ..layout(Format::Hermes)
    };
    let answer = "<think>\nIs <tool_call>{\"name\": \"write\"}</tool_call> wise?\n</think>\n\nYes.\n";
    assert_eq!(
        asked.parse(answer),
        [
            reasoning("Is <tool_call>{\"name\": \"write\"}</tool_call> wise?"),
            text("Yes.\n")
        ]
    );
    // no call is found in it either way
    assert_eq!(layout(Format::Hermes).parse(answer), [text(answer)]);
    let inside = Layout {
        begins_with_reasoning: true,
        ..asked.clone()
    };
    assert_eq!(inside.parse("Hm.</think>Yes."), [reasoning("Hm."), text("Yes.")]);
    assert_eq!(inside.parse("Hm, "), [reasoning("Hm,")]);
    assert_eq!(asked.parse("The tag <think> is"), [text("The tag <think> is")]);
    assert_eq!(asked.parse("<thi"), [text("<thi")]);
    let bare = Layout {
        calls: Some((Format::Llama, tools())),
        ..asked
    };
    assert_eq!(
        bare.parse("<think>x</think>\n{\"name\": \"write\"}"),
        [reasoning("x"), call("write", "{}")]
    );
}

#[test]
fn the_format_follows_from_the_template() {
    for (source, format) in [
        ("…<tool_call>\n<function=example_function_name>", Some(Format::QwenXml)),
        ("<tool_call>\n{{ tool_call | tojson }}", Some(Format::Hermes)),
        ("<tool_call>{name}\n<arg_key>", None),
        ("{{ '[TOOL_CALLS]' }}", Some(Format::Mistral)),
        ("<｜tool▁call▁begin｜>", Some(Format::DeepSeek)),
        (
            r#"format {"name": function name, "parameters": dictionary"#,
            Some(Format::Llama),
        ),
        ("{{ message.content }}", None),
    ] {
        assert_eq!(Format::of_template(source), format, "{source}");
    }
}

fn formats() -> impl Strategy<Value = Format> {
    prop_oneof![
        Just(Format::Hermes),
        Just(Format::QwenXml),
        Just(Format::Llama),
        Just(Format::Mistral),
        Just(Format::DeepSeek),
        Just(Format::Json),
    ]
}

/// Fragments of all formats in any order, some of them cut.
fn answers() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=write>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
        "{\"name\": \"write\", \"arguments\": {\"text\": \"</tool_call> é\"}}",
        "{\"name\": \"weather\", \"parameters\": {}}",
        "[{\"name\": \"write\"}]",
        "[TOOL_CALLS]",
        "write[ARGS]{}",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "write<｜tool▁sep｜>{}",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "{",
        "\"",
        " ",
        "\n\n",
        "é",
        "words",
    ]);
    prop::collection::vec((fragment, 0usize..24), 0..14).prop_map(|fragments| {
        let cut = |(fragment, keep): (&str, usize)| match keep {
            // one in six is cut
            0..4 => fragment.chars().take(keep + 1).collect(),
            _ => fragment.to_owned(),
        };
        fragments.into_iter().map(cut).collect::<String>()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_parts_do_not_depend_on_the_pieces(
        format in formats(), answer in answers(), cuts in prop::collection::vec(0usize..400, 0..12),
        separate_reasoning in any::<bool>(), begins_with_reasoning in any::<bool>(),
    ) {
        let layout = Layout { separate_reasoning, begins_with_reasoning, ..layout(format) };
        let characters: Vec<char> = answer.chars().collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(characters.len())).collect();
        cuts.extend([0, characters.len()]);
        cuts.sort_unstable();
        let pieces: Vec<String> = cuts.windows(2).map(|cut| characters[cut[0]..cut[1]].iter().collect()).collect();
        prop_assert_eq!(streamed(&layout, pieces.iter().map(String::as_str)), layout.parse(&answer));
    }

    #[test]
    fn an_answer_without_calls_keeps_every_byte(format in formats(), answer in answers()) {
        let parts = layout(format).parse(&answer);
        if !parts.iter().any(|part| matches!(part, Part::Call(_))) {
            let whole: Vec<Part> = if answer.is_empty() { vec![] } else { vec![text(&answer)] };
            prop_assert_eq!(parts, whole);
        }
    }
}

#[test]
fn elements_become_what_the_schema_wants() {
    let parameters = json!({"type": "object", "$defs": {"Days": {"type": "integer"}}, "properties": {
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "named": {"$ref": "#/$defs/Days"},
        "either": {"oneOf": [{"$ref": "#/$defs/Days"}, {"type": "object"}]},
        "all": {"allOf": [{"type": "array"}]},
        "level": {"enum": [1, 2, 3]},
        "unit": {"enum": ["1", "2"]},
        "exact": {"type": "boolean"},
        "city": {"type": ["string", "null"]},
        "text": {"type": "string"},
        "nothing": {"type": "null"},
        "loop": {"$ref": "#/properties/loop"},
    }});
    let tools = Tools::of(&[json!({"type": "function", "function": {"name": "f", "parameters": parameters}})]);
    let layout = Layout {
        calls: Some((Format::QwenXml, tools)),
        ..Layout::default()
    };
    for (name, written, expected) in [
        ("days", "5", "5"),
        ("days", "null", "null"),
        ("days", "None", "null"),
        ("named", "5", "5"),
        ("either", "5", "5"),
        ("either", "{\"a\": 1}", "{\"a\": 1}"),
        ("all", "[1]", "[1]"),
        ("level", "2", "2"),
        ("unit", "2", "\"2\""),
        ("exact", "True", "true"),
        ("exact", "False", "false"),
        ("exact", "true", "true"),
        ("city", "None", "null"),
        ("city", "Bonn", "\"Bonn\""),
        ("city", "5", "\"5\""),
        ("text", "None", "\"None\""),
        ("text", "True", "\"True\""),
        ("nothing", "None", "null"),
        ("days", "many", "\"many\""),
        ("loop", "5", "\"5\""),
        ("unknown", "5", "\"5\""),
    ] {
        let answer = format!(
            "<tool_call>\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        );
        let expected = call("f", &format!("{{\"{name}\": {expected}}}"));
        assert_eq!(layout.parse(&answer), [expected], "{name}: {written}");
    }
}

#[test]
fn bare_json_is_a_call_only_of_a_tool_with_arguments() {
    let layout = layout(Format::Json);
    for answer in [
        "{\"name\": \"Bob\", \"arguments\": {}}",
        "{\"name\": \"weather\"}",
        "{\"temp\": 21}",
    ] {
        assert_eq!(layout.parse(answer), [text(answer)]);
    }
    let answer = "{\"name\": \"write\", \"arguments\": {\"a\": 1}}";
    assert_eq!(layout.parse(answer), [call("write", "{\"a\": 1}")]);
}
