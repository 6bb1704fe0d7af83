use super::*;
use serde_json::json;
use std::sync::Arc;

fn sample<'a>(text: &'a str, answer: &'a str) -> Sample<'a> {
    Sample {
        rollout: Uuid::nil(),
        id: "7",
        prompt: "1 + 1 =",
        answer,
        text,
    }
}

fn read(grader: serde_json::Value) -> Result<Grader, String> {
    let grader: Grader = serde_json::from_value(grader).map_err(|error| error.to_string())?;
    grader.check().map(|()| grader)
}

fn try_grade(grader: serde_json::Value, text: &str, answer: &str) -> Result<Grade, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (grader, context) = (read(grader).unwrap(), Context::new(None, Arc::default()));
    runtime.block_on(grader.grade(&context, &sample(text, answer)))
}

fn grade(grader: serde_json::Value, text: &str, answer: &str) -> f64 {
    try_grade(grader, text, answer).unwrap().reward
}

#[test]
fn exact_match_ignores_blanks_at_the_ends_only() {
    let grade = |text, answer| grade(json!("exact_match"), text, answer);
    assert_eq!(grade(" let x = 1; \n", "let x = 1;"), 1.0);
    assert_eq!(grade("let  x = 1;", "let x = 1;"), 0.0);
    assert_eq!(grade("", "x"), 0.0);
}

#[test]
fn prefix_match_rewards_every_matching_character() {
    let grade = |text, answer| grade(json!("prefix_match"), text, answer);
    assert_eq!(grade("abcx", "abcd"), 0.75);
    assert_eq!(grade("abcd and more", "abcd"), 1.0);
    assert_eq!(grade("", "abcd"), 0.0);
    assert_eq!(grade("größe", "größer"), 5.0 / 6.0);
}

#[test]
fn contains_finds_the_answer_anywhere() {
    let grade = |text, answer| grade(json!("contains"), text, answer);
    assert_eq!(grade("the answer is 42.", "42"), 1.0);
    assert_eq!(grade("the answer is 4", "42"), 0.0);
}

fn string_check(operation: &str) -> serde_json::Value {
    json!({"type": "string_check", "name": "right", "operation": operation,
        "input": "{{ sample.output_text }}", "reference": "is {{item.answer}}"})
}

#[test]
fn string_checks_compare_texts_with_the_tasks_fields_in_them() {
    for (operation, text, expected) in [
        ("eq", "is Two", 1.0),
        ("eq", "it is Two", 0.0),
        ("ne", "it is Two", 1.0),
        ("like", "it is Two.", 1.0),
        ("like", "it is two.", 0.0),
        ("ilike", "it is two.", 1.0),
    ] {
        assert_eq!(
            grade(string_check(operation), text, "Two"),
            expected,
            "{operation} {text}"
        );
    }
}

fn similarity(input: &str) -> serde_json::Value {
    json!({"type": "text_similarity", "input": input, "reference": "{{ item.answer }}",
        "evaluation_metric": "fuzzy_match"})
}

#[test]
fn similarity_counts_insertions_and_deletions() {
    let grade = |text, answer| grade(similarity("{{ sample.output_text }}"), text, answer);
    // one insertion among 14 + 15 characters
    assert!((grade("this is a test", "this is a test!") - (1.0 - 1.0 / 29.0)).abs() < 1e-9);
    assert_eq!((grade("same", "same"), grade("ab", "cd")), (1.0, 0.0));
}

#[test]
fn several_graders_are_put_together_by_an_expression() {
    let multi = |output: &str| {
        json!({"type": "multi", "calculate_output": output, "graders": {
            "right": string_check("like"), "similar": similarity("{{ sample.output_text }}")}})
    };
    let expected = 0.75 + 0.25 * (2.0 * 3.0 / 9.0);
    let got = grade(multi("0.75 * right + 0.25 * similar"), "is Two", "Two");
    assert!((got - expected).abs() < 1e-9, "{got}");
    // no number, no reward
    let divided = multi("right == 1.0 && similar < 1.0 ? 1.0 / 0.0 : right");
    let error = try_grade(divided, "is Two", "Two").unwrap_err();
    assert_eq!(error.cause.code(), "grade_invalid", "{error}");
    let long = format!("right + similar{}", " + 1.0".repeat(200));
    for (output, reason) in [
        ("right + similar + wrong", "wrong"),
        ("right +", "calculate_output"),
        ("right == similar", "not a number"),
        ("right", "similar"),
        ("similar / right", "with 0"),
        ("right + similar + [1.0].map(x, x)[0]", "arithmetic"),
        (&long, "1024"),
    ] {
        let refused = read(multi(output)).unwrap_err();
        assert!(
            refused.starts_with("grader: calculate_output") && refused.contains(reason),
            "{refused}"
        );
    }
    let none = json!({"type": "multi", "calculate_output": "1.0", "graders": {}});
    assert!(read(none).unwrap_err().contains("graders"));
    let nested = json!({"type": "multi", "calculate_output": "a", "graders": {"a": multi("right")}});
    assert!(read(nested).unwrap_err().contains("graders.a"));
}

#[test]
fn what_cannot_work_is_refused_with_the_field() {
    for (grader, reason) in [
        (json!("bleu"), "bleu"),
        (json!({"type": "python", "source": ""}), "source: "),
        (
            json!({"type": "python", "source": "def grade(sample, item): return 1", "image_tag": "a"}),
            "image_tag",
        ),
        (
            similarity("{{ item.reference_answer }}"),
            "input: `item.reference_answer`",
        ),
        (similarity("{{ item.answer"), "input: `{{` without `}}`"),
        (
            json!({"type": "text_similarity", "input": "a", "reference": "b", "evaluation_metric": "meteor"}),
            "meteor",
        ),
        (
            json!({"type": "string_check", "input": "a", "reference": "b", "operation": "eq", "case": 1}),
            "case",
        ),
        (
            json!({"type": "score_model", "model": "large", "input": []}),
            "input: there must",
        ),
        (
            json!({"type": "score_model", "model": "large", "input": [{"role": "user", "content": "{{ item.x }}"}]}),
            "input[0]: `item.x`",
        ),
        (
            json!({"type": "score_model", "model": "", "input": [{"role": "user", "content": "a"}]}),
            "model: name a judge",
        ),
        (
            json!({"type": "score_model", "model": "large", "range": [1, 1],
                "input": [{"role": "user", "content": "a"}]}),
            "range",
        ),
        (
            json!({"type": "score_model", "model": "large", "sampling_params": {"top_p": 2},
                "input": [{"role": "user", "content": "a"}]}),
            "sampling_params.top_p",
        ),
        (
            json!({"type": "rubric", "model": "large", "rubric": " "}),
            "rubric: the text",
        ),
        (
            json!({"type": "rubric", "model": "large", "rubric": "It greets.", "votes": 2}),
            "votes must be odd",
        ),
    ] {
        let refused = read(grader).unwrap_err();
        assert!(refused.starts_with("grader: ") && refused.contains(reason), "{refused}");
    }
}

#[test]
fn a_grader_is_kept_as_it_was_asked_for() {
    let score = json!({"type": "score_model", "name": "right", "model": "large", "range": [0.0, 1.0],
        "input": [{"role": "user", "content": "{{ sample.output_text }}"}],
        "sampling_params": {"temperature": 0.5, "seed": 1}});
    let rubric = json!({"type": "rubric", "model": "large", "rubric": "It greets.", "votes": 3});
    for grader in [
        json!("contains"),
        string_check("eq"),
        similarity("{{item.id}}"),
        score,
        rubric,
    ] {
        assert_eq!(serde_json::to_value(read(grader.clone()).unwrap()).unwrap(), grader);
    }
}
