//! `/trajectories/{id}/texts`: the prompt and the answer, beside other answers. Whoever opens it is in the
//! audit.

use axum::extract::State;
use axum::extract::rejection::FormRejection;
use edge::Problem;
use edge::auth::Principal;
use edge::path::Path;
use maud::{Markup, html};
use report::number::decimal;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::api::texts::{Asked, Text};
use crate::page::layout::{Page, Region, Shown};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{ago, short, version};

pub async fn page(
    State(site): State<Site>,
    viewer: Viewer,
    principal: Principal,
    Path(id): Path<Uuid>,
    filled_in: Result<axum::Form<Asked>, FormRejection>,
) -> Result<Shown, Problem> {
    let axum::Form(asked) = filled_in.map_err(|rejection| Problem::bad_request(rejection.body_text()))?;
    let texts = site.texts().read(&principal, id, &asked).await?;
    let regions = [Region {
        id: "texts",
        title: "Prompt and answers",
        body: shown(id, &texts, OffsetDateTime::now_utc()),
        sources: vec![
            format!("POST /v1/generations/{id}/texts"),
            "springtide audit list --action texts".into(),
        ],
    }];
    let page = Page {
        title: "Texts of one answer",
        section: "/trajectories",
        lead: html! { a href=(format!("/trajectories/{id}")) { code { (id) } } },
        live: None,
        top: html! {},
        regions: &regions,
        bottom: form(id),
    };
    Ok(page.show(&site, &viewer))
}

/// Asks for the reason, and for another answer.
pub fn form(id: Uuid) -> Markup {
    html! {
        section aria-labelledby="read-title" {
            h2 #read-title { "Read the texts" }
            p .note { "The audit keeps who reads which answer, and why." }
            form .filter method="post" action=(format!("/trajectories/{id}/texts")) {
                div {
                    label for="reason" { "Why" }
                    input id="reason" name="reason" required maxlength="500";
                }
                div {
                    label for="beside" { "Beside (an answer's id; default: other answers to the same prompt)" }
                    input id="beside" name="beside" pattern="[0-9a-fA-F\\-]{36}";
                }
                button { "Read" }
            }
        }
    }
}

fn shown(id: Uuid, texts: &[Text], now: OffsetDateTime) -> Markup {
    // one prompt, if all answer the same
    let first = texts.first().map(|text| &text.prompt);
    let same = texts.iter().all(|text| Some(&text.prompt) == first);
    html! {
        @if let (true, Some(prompt)) = (same, first) { (prompt_of(prompt.as_deref())) }
        div .beside {
            @for text in texts {
                div .card {
                    h3 {
                        "Version " (version(text.version))
                        @if text.generation == id { " (this one)" }
                        @else { " " a href=(format!("/trajectories/{}", text.generation)) { (short(text.generation)) } }
                    }
                    @if !same { (prompt_of(text.prompt.as_deref())) }
                    @if text.declined { p { "The policy declined." } }
                    @else { pre tabindex="0" { (text.answer) } }
                    p .note {
                        "reward " (decimal(text.reward, 3)) ", " (text.arm) ", " (text.purpose) ", ended: " (text.finish_reason) ", "
                        (ago(text.sampled_at, now))
                    }
                }
            }
        }
        @if texts.len() < 2 {
            p .note { "None of the answers near it, within an hour, is to the same prompt. Name one below to compare." }
        }
    }
}

fn prompt_of(prompt: Option<&str>) -> Markup {
    html! {
        @match prompt {
            Some(prompt) => { div .card { h3 { "Prompt" } pre tabindex="0" { (prompt) } } }
            None => { p .note { "The prompt is long and stored in parts, which this page cannot read: springtide dataset export has it." } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn text(id: u128, prompt: Option<&str>, answer: &str) -> Text {
        Text {
            generation: Uuid::from_u128(id),
            version: id as i64,
            arm: "champion".into(),
            purpose: "production".into(),
            sampled_at: datetime!(2026-11-26 02:59 UTC),
            finish_reason: "stop".into(),
            declined: answer.is_empty(),
            reward: (id == 1).then_some(0.25),
            prompt: prompt.map(str::to_owned),
            answer: answer.to_owned(),
        }
    }

    #[test]
    fn answers_to_one_prompt_stand_side_by_side_and_are_escaped() {
        let now = datetime!(2026-11-26 03:00 UTC);
        let id = Uuid::from_u128(1);
        let page = shown(
            id,
            &[text(1, Some("fn <a>"), "<script>"), text(2, Some("fn <a>"), "")],
            now,
        )
        .into_string();
        assert_eq!(page.matches("Prompt").count(), 1, "{page}");
        for part in [
            "fn &lt;a&gt;",
            "&lt;script&gt;",
            "this one",
            "The policy declined.",
            "0.250",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let page = shown(id, &[text(1, Some("a"), "b"), text(2, None, "c")], now).into_string();
        assert!(page.contains("stored in parts") && page.contains("Prompt"), "{page}");
        assert!(
            shown(id, &[text(1, Some("a"), "b")], now)
                .into_string()
                .contains("None of the answers near it")
        );
    }
}
