//! The same pauses before and after: the only place of the report that holds text of prompts.

use maud::{Markup, html};

use super::section;
use crate::demo::{
    references::{Example, Suggested},
    report::Report,
};

impl Report {
    pub fn examples_section(&self) -> Markup {
        let examples = self.headroom.as_ref().map_or(&[][..], |headroom| &headroom.examples);
        section(
            "Before and after",
            &html! {
                @if examples.is_empty() {
                    p { "This run kept no examples." }
                } @else {
                    p { "Pauses of users whom the frozen arm serves, so none was trained on: what the first and the last version suggest there, greedily." }
                    div .grid { @for example in examples { (figure(example)) } }
                }
            },
        )
    }
}

fn figure(example: &Example) -> Markup {
    html! {
        figure .card.example {
            figcaption { span { (example.file) } }
            pre { (example.context) span .cursor { "▏" } span .typed { (example.typed) } }
            table {
                tr { th { "typed" } td { code { (example.typed) } } td { "" } }
                (suggested("before", &example.before))
                (suggested("after", &example.after))
            }
        }
    }
}

fn suggested(when: &str, suggested: &Suggested) -> Markup {
    let (class, word) = match (&suggested.text, suggested.right) {
        (None, _) => ("declined", "declined"),
        (Some(_), true) => ("good", "right"),
        (Some(_), false) => ("bad", "wrong"),
    };
    html! {
        tr {
            th { (when) " v" (suggested.version) }
            td { @if let Some(text) = &suggested.text { code { (text) } } }
            td class=(class) { (word) }
        }
    }
}
